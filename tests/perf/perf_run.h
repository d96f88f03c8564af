// Runs a tool (default: verbatim-perf) as a process with arguments and environment, and collects its output.
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
  int status = -1;     // exit status; -1 when a signal ended the process
  std::string output;  // stdout and stderr
};

class PerfProcess {
 public:
  using Environment = std::vector<std::string>;  // NAME=VALUE

  // Starts the program that the environment variable `program` names.
  explicit PerfProcess(const std::vector<std::string>& arguments, const Environment& environment = {},
                       const char* program = "PERF_TOOL");
  PerfProcess(const PerfProcess&) = delete;
  PerfProcess& operator=(const PerfProcess&) = delete;
  ~PerfProcess();

  // Reads until a line contains `text`, and returns this line; empty at the end of the output.
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

// A port that was free when this function checked it. It is below the ephemeral range, so that the kernel does not give
// it to another connection before the rank uses it.
std::uint16_t free_port();

}  // namespace verbatim::perf
