// One rank of a verbatim-kv job, from loading the plugin to unloading it.
#pragma once

#include <memory>

#include "ranks/coordinator_connection.h"
#include "ranks/job.h"
#include "verbatim-kv/options.h"

namespace verbatim::kv {

// Rank 0 prints the table.
std::unique_ptr<ranks::Rank> make_rank(const Options& options, ranks::CoordinatorConnection& coordinator);

}  // namespace verbatim::kv
