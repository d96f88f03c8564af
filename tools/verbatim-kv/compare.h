// The same requests over one network after the other, turn by turn, and the medians.
#pragma once

#include "verbatim-kv/options.h"

namespace verbatim::kv {

// Runs this program with the arguments `argv` once for each turn and entry of --compare. Stops at the first that fails.
ExitStatus run_compare(const Options& options, int argc, char** argv);

}  // namespace verbatim::kv
