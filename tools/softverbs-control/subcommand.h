// What a subcommand of tools/softverbs is: a name, a line of help, and a function that declares its arguments. Each
// lives in a file of its own; main.cc has the table of all of them.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <stdexcept>

#include "softverbs-control/process_directory.h"

namespace verbatim::control {

// Ends the program with a line on stderr and exit status 1.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs after the arguments have been read. Throws Failure; the result is the exit status.
using Action = std::function<int(ProcessDirectory& host)>;

struct Subcommand {
  const char* name;
  const char* help;
  Action (*declare)(CLI::App& arguments);
};

Action declare_hold(CLI::App& arguments);
Action declare_release(CLI::App& arguments);
Action declare_stats(CLI::App& arguments);
Action declare_fault(CLI::App& arguments);

}  // namespace verbatim::control
