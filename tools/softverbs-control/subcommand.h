// A subcommand of tools/softverbs: a name, a line of help, and a function that declares its arguments. Each subcommand
// has a file of its own, except hold and release, which share clock.cc. main.cc has the table of them.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <stdexcept>

#include "softverbs-control/process_directory.h"

namespace verbatim::control {

// main() prints it to stderr and exits with status 1.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Called after the arguments are parsed. Returns the exit status; may throw Failure.
using Action = std::function<int(ProcessDirectory& directory)>;

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
