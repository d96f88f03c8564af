// One rank of a job, from loading the plugin to unloading it.
#pragma once

#include <memory>

#include "ranks/job.h"
#include "ranks/link.h"
#include "verbatim-perf/options.h"

namespace verbatim::perf {

// Rank 0 prints the table.
std::unique_ptr<ranks::Rank> make_rank(const Options& options, ranks::Link& link);

}  // namespace verbatim::perf
