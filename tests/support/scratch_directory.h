// A directory of the running test's own, removed with everything in it.
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
  // Several builds may run their tests side by side.
  static std::string name() {
    std::string name =
        "verbatim-" + std::to_string(getpid()) + "-" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(name.begin(), name.end(), '/', '-');  // of a test with a parameter
    return name;
  }

  const std::filesystem::path path_ = std::filesystem::path(testing::TempDir()) / name();
};

}  // namespace verbatim
