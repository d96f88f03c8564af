// Measuring processes: started with variables of their own, waited for, and what they leave.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace verbatim::perf {

// A directory for what the processes leave; it goes with this object.
class Scratch {
 public:
  explicit Scratch(const std::string& name);  // a part of the directory's name. Throws Failure
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// Runs `arguments` with these variables added and waits for the end; the output goes to `log`. Throws Failure with it
// when the process fails.
void run_process(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                 const std::filesystem::path& log);

}  // namespace verbatim::perf
