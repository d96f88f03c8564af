// --over nixl: each rank reads the rows that it needs from the weights of the ranks that hold them, with NIXL.
#pragma once

#include "ranks/failure.h"
#include "verbatim-eplb/options.h"

namespace verbatim::eplb {

// Starts all ranks, as processes of a Python that has NIXL. Throws Failure and BadInput.
ranks::ExitStatus run_over_nixl(const Options& options);

}  // namespace verbatim::eplb
