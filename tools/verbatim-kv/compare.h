// Runs the same requests over several networks or plugins in rounds and prints the medians.
#pragma once

#include "verbatim-kv/options.h"

namespace verbatim::kv {

// Runs this program with the arguments `argv` once for each round and entry of --compare. Throws Failure at the first
// run that fails.
ExitStatus run_compare(const Options& options, int argc, char** argv);

}  // namespace verbatim::kv
