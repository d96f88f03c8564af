// The work of the measuring processes of `verbatim-perf cost`.
#pragma once

#include "verbatim-perf/cost/options.h"

namespace verbatim::perf::cost {

// In a measuring process: measures `options.part` of options.plugins[0] and writes `options.result`. Throws Failure.
ExitStatus measure(const CostOptions& options);

}  // namespace verbatim::perf::cost
