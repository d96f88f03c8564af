// A directory for the running test. The destructor removes it with its contents.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>

namespace verbatim {

class ScratchDirectory {
 public:
  ScratchDirectory() { std::filesystem::create_directories(path_); }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  // The pid makes the name unique when several builds run their tests at the same time.
  static std::string name() {
    std::string name =
        "verbatim-" + std::to_string(getpid()) + "-" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(name.begin(), name.end(), '/', '-');  // names of parameterized tests contain a slash
    return name;
  }

  const std::filesystem::path path_ = std::filesystem::path(testing::TempDir()) / name();
};

}  // namespace verbatim
