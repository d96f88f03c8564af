// A directory for what the processes that a tool starts leave behind.
#pragma once

#include <filesystem>
#include <string>

namespace verbatim::ranks {

// It goes with this object, and everything in it.
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

}  // namespace verbatim::ranks
