// --mode nixl: the requests of the run, moved by NIXL.
#pragma once

#include "verbatim-kv/options.h"

namespace verbatim::kv {

// Starts all ranks, as processes of a Python that has NIXL. Throws Failure.
ExitStatus run_over_nixl(const Options& options);

}  // namespace verbatim::kv
