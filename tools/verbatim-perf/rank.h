// One rank of a job, from loading the plugin to unloading it.
#pragma once

#include "verbatim-perf/failure.h"
#include "verbatim-perf/options.h"

namespace verbatim::perf {

// Runs the rank that `options` name; rank 0 prints the table and, unless a launcher does, meets the others.
ExitStatus run_rank(const Options& options);

}  // namespace verbatim::perf
