// The same plan over one network after the other, turn by turn, and the medians.
#pragma once

#include "ranks/failure.h"
#include "verbatim-eplb/options.h"

namespace verbatim::eplb {

// Runs this program with the arguments `argv` once for each turn and entry of --compare. Stops at the first that fails.
ranks::ExitStatus run_compare(const Options& options, int argc, char** argv);

}  // namespace verbatim::eplb
