// How a tool exits: the exit statuses of all tools, and the exception that carries one up to main.
#pragma once

#include <stdexcept>
#include <string>

namespace verbatim::cli {

// Also in tools/README.md; a test compares them.
constexpr const char* kExitStatuses =
    "Exit status: 0 success; 1 a bad result: wrong data, an init that fails, a ratio below the floor; 2 wrong usage;\n"
    "3 a failure of a plugin, a rank or the system; 4 timeout; of verbatim-kv also 5: invalid requests were rejected,\n"
    "6: blocks must be recomputed.";

enum class ExitStatus : int {
  kOk = 0,
  kWrong = 1,    // the run completed, but its result is bad: wrong data, an init that fails, a ratio below the floor
  kUsage = 2,    // the command line, or a file that it names, is invalid
  kFailed = 3,   // the plugin, a rank or the system failed
  kTimeout = 4,  // --timeout passed
  // Runs that completed as they should, of tools that can leave out a part of their work:
  kRejected = 5,   // some requests were rejected
  kRecompute = 6,  // some blocks could not be transferred and are listed for recomputation
};

struct Failure : std::runtime_error {
  explicit Failure(const std::string& what, ExitStatus exit_status = ExitStatus::kFailed)
      : std::runtime_error(what), status(exit_status) {}
  ExitStatus status;
};

// Prints a line on stderr that begins with the program's name.
void print_error(const std::string& what);

}  // namespace verbatim::cli
