// One rank of a run over a plugin's RMA table (--mode put).
#pragma once

#include <memory>

#include "ranks/coordinator_connection.h"
#include "ranks/job.h"
#include "verbatim-kv/options.h"

namespace verbatim::kv {

std::unique_ptr<ranks::Rank> make_put_rank(const Options& options, ranks::CoordinatorConnection& coordinator);

}  // namespace verbatim::kv
