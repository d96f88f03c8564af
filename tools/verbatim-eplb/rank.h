// One rank of a verbatim-eplb run.
#pragma once

#include <memory>

#include "ranks/coordinator_connection.h"
#include "ranks/job.h"
#include "verbatim-eplb/options.h"

namespace verbatim::eplb {

// Rank 0 prints the table.
std::unique_ptr<ranks::Rank> make_rank(const Options& options, ranks::CoordinatorConnection& coordinator);

}  // namespace verbatim::eplb
