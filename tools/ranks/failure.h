// How a tool that runs ranks ends: its exit statuses, and the exception that carries one up to main.
#pragma once

#include <stdexcept>
#include <string>

namespace verbatim::ranks {

enum class ExitStatus : int {
  kOk = 0,
  kWrong = 1,    // the traffic ran, and some of the data was wrong
  kUsage = 2,    // the command line, or an input that it names, makes no sense
  kFailed = 3,   // the plugin, a rank or the system failed
  kTimeout = 4,  // --timeout passed
  // How a run may end that went as it should, of tools that can decline a part of their work:
  kRefused = 5,    // some of it made no sense
  kRecompute = 6,  // some of it failed, and is named
};

// What ends a job as soon as one rank leaves with it.
constexpr bool is_failure(int status) {
  return status >= static_cast<int>(ExitStatus::kUsage) && status != static_cast<int>(ExitStatus::kRefused) &&
         status != static_cast<int>(ExitStatus::kRecompute);
}

struct Failure : std::runtime_error {
  explicit Failure(const std::string& what, ExitStatus exit_status = ExitStatus::kFailed)
      : std::runtime_error(what), status(exit_status) {}
  ExitStatus status;
};

// A line on stderr that begins with the program's name.
void print_error(const std::string& what);

}  // namespace verbatim::ranks
