// How a tool that runs ranks exits: the exit statuses, and the exception that carries a status up to main.
#pragma once

#include <stdexcept>
#include <string>

namespace verbatim::ranks {

enum class ExitStatus : int {
  kOk = 0,
  kWrong = 1,    // the run completed, but some data was wrong
  kUsage = 2,    // the command line, or a file that it names, is invalid
  kFailed = 3,   // the plugin, a rank or the system failed
  kTimeout = 4,  // --timeout passed
  // Runs that completed as they should, of tools that can leave out a part of their work:
  kRejected = 5,   // some requests were rejected
  kRecompute = 6,  // some blocks could not be transferred and are listed for recomputation
};

// Whether the whole job ends as soon as one rank exits with `status`.
constexpr bool is_failure(int status) {
  return status >= static_cast<int>(ExitStatus::kUsage) && status != static_cast<int>(ExitStatus::kRejected) &&
         status != static_cast<int>(ExitStatus::kRecompute);
}

struct Failure : std::runtime_error {
  explicit Failure(const std::string& what, ExitStatus exit_status = ExitStatus::kFailed)
      : std::runtime_error(what), status(exit_status) {}
  ExitStatus status;
};

// Prints a line on stderr that begins with the program's name.
void print_error(const std::string& what);

}  // namespace verbatim::ranks
