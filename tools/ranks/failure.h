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
};

struct Failure : std::runtime_error {
  explicit Failure(const std::string& what, ExitStatus exit_status = ExitStatus::kFailed)
      : std::runtime_error(what), status(exit_status) {}
  ExitStatus status;
};

// A line on stderr that begins with the program's name.
void complain(const std::string& what);

}  // namespace verbatim::ranks
