// One rank of put, put_signal, get or alltoall_put, from loading the plugin to unloading it.
#pragma once

#include <memory>

#include "ranks/coordinator_connection.h"
#include "ranks/job.h"
#include "verbatim-perf/options.h"

namespace verbatim::perf {

// Rank 0 prints the table.
std::unique_ptr<ranks::Rank> make_put_rank(const Options& options, ranks::CoordinatorConnection& coordinator);

}  // namespace verbatim::perf
