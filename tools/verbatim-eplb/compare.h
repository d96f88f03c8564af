// Runs the same plan over several networks or plugins in rounds and prints the medians.
#pragma once

#include "ranks/failure.h"
#include "verbatim-eplb/options.h"

namespace verbatim::eplb {

// Runs this program with the arguments `argv` once for each round and entry of --compare. Throws Failure at the first
// run that fails.
ranks::ExitStatus run_compare(const Options& options, int argc, char** argv);

}  // namespace verbatim::eplb
