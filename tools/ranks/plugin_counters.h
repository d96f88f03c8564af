// What Verbatim itself counts (VERBATIM_STATS), for who wants to compare it with what was asked of the plugin.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace verbatim::ranks {

class PluginCounters {
 public:
  // Has the plugin write its counters to a file of this process, or to where VERBATIM_STATS says already. Before the
  // plugin is loaded.
  explicit PluginCounters(std::uint64_t token);
  PluginCounters(const PluginCounters&) = delete;
  PluginCounters& operator=(const PluginCounters&) = delete;
  ~PluginCounters();

  // What was written once the plugin is unloaded; nothing where another plugin, or none, carried the bytes.
  std::optional<std::string> text() const;

 private:
  std::string path_;
  bool own_ = false;
};

}  // namespace verbatim::ranks
