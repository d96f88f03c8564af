// Checks that all ranks of verbatim-kv run with the same settings and requests.
#pragma once

#include <vector>

#include "ranks/coordinator_connection.h"
#include "verbatim-kv/options.h"

namespace verbatim::kv {

// Throws Failure that names the first rank that differs from rank 0 and in what. Every rank must call it. The geometry
// of the families is not compared here: ranks that connect to each other compare it.
void agree(ranks::CoordinatorConnection& coordinator, const Options& options, const std::vector<Request>& requests);

}  // namespace verbatim::kv
