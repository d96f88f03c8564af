// What Verbatim itself says it carried, against the plan: the proof that the bytes went through the plugin.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace verbatim::eplb {

class Stats {
 public:
  // Has the plugin write its counters to a file of this process, or to where VERBATIM_STATS says already. Before the
  // plugin is loaded.
  explicit Stats(std::uint64_t token);
  Stats(const Stats&) = delete;
  Stats& operator=(const Stats&) = delete;
  ~Stats();

  // After the plugin was unloaded: "equal", "absent" when nothing was written (another plugin), or what differs.
  std::string compare(const std::vector<std::uint64_t>& sent, const std::vector<std::uint64_t>& received) const;

 private:
  std::string path_;
  bool own_ = false;
};

// The same on a file's text.
std::string compare_stats(const std::string& text, const std::vector<std::uint64_t>& sent,
                          const std::vector<std::uint64_t>& received);

}  // namespace verbatim::eplb
