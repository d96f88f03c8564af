// Whether all ranks are about to serve the same requests.
#pragma once

#include <vector>

#include "ranks/coordinator_connection.h"
#include "verbatim-kv/options.h"

namespace verbatim::kv {

// Throws Failure naming the first rank that disagrees with rank 0, and about what. Every rank must call it. The shape
// of the families' blocks is not looked at: ranks that connect to each other do that.
void agree(ranks::CoordinatorConnection& coordinator, const Options& options, const std::vector<Request>& requests);

}  // namespace verbatim::kv
