// A temporary directory for the files of the processes that a tool starts.
#pragma once

#include <filesystem>
#include <string>

namespace verbatim::ranks {

// The destructor removes the directory with its files.
class Scratch {
 public:
  explicit Scratch(const std::string& name);  // `name` becomes part of the path. Throws Failure
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace verbatim::ranks
