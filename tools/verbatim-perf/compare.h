// Implements --compare: one operation over several plugins in turn.
#pragma once

#include "verbatim-perf/options.h"

namespace verbatim::perf {

// Runs the command line `argv` over each plugin of options.compare, options.rounds times, and prints for each size the
// medians of the rounds. Throws Failure when a run fails or finds wrong data.
ExitStatus run_compare(const Options& options, int argc, char** argv);

}  // namespace verbatim::perf
