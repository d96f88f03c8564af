// Runs a tool, verbatim-perf unless another is named, as a user does: as a process, with arguments and environment,
// looking at what comes out.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace verbatim::perf {

// Exit status of verbatim-perf.
constexpr int kCorrect = 0;
constexpr int kWrong = 1;
constexpr int kUsage = 2;
constexpr int kFailed = 3;
constexpr int kTimeout = 4;

struct Outcome {
  int status = -1;     // exit status; -1 when it was ended by a signal
  std::string output;  // stdout and stderr
};

class PerfProcess {
 public:
  using Environment = std::vector<std::string>;  // NAME=VALUE

  // Starts the program that the environment variable `program` names.
  explicit PerfProcess(const std::vector<std::string>& arguments, const Environment& environment = {},
                       const char* program = "VERBATIM_PERF");
  PerfProcess(const PerfProcess&) = delete;
  PerfProcess& operator=(const PerfProcess&) = delete;
  ~PerfProcess();

  // Reads until a line contains `text`; answers that line, empty at the end of output.
  std::string wait_for_line(const std::string& text);
  Outcome finish();

 private:
  std::FILE* output_ = nullptr;
  pid_t pid_ = -1;
  std::string read_;
};

inline Outcome run(const std::vector<std::string>& arguments, const PerfProcess::Environment& environment = {}) {
  return PerfProcess(arguments, environment).finish();
}

// The value of an environment variable that the build sets for this test; fails the test when it is missing.
std::string setting(const char* name);

// That was free a moment ago, below the ports that connections of other programs get by themselves: nobody takes it
// before the rank does.
std::uint16_t free_port();

}  // namespace verbatim::perf
