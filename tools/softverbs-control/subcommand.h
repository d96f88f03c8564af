// A subcommand of tools/softverbs: a name, a line of help, and a function that declares its arguments. Each subcommand
// has a file of its own, except hold and release, which share clock.cc. main.cc has the table of them.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "cli/exit_status.h"
#include "softverbs-control/process_directory.h"

namespace verbatim::control {

using cli::ExitStatus;
using cli::Failure;

// Called after the arguments are parsed; may throw Failure.
using Action = std::function<ExitStatus(ProcessDirectory& directory)>;

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
