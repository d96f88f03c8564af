// The requests, blocks and faults of a run as nixl_kv.py reads them.
#pragma once

#include <vector>

#include "ranks/json.h"
#include "verbatim-kv/layout.h"
#include "verbatim-kv/options.h"

namespace verbatim::kv {

// The blocks of a request come from the same pools as in the other modes. In those, a request ends when it ends; here
// the oldest request ends when as many are in flight as may be, so that the plan is known before the run.
ranks::Json nixl_plan(const Options& options, const std::vector<Request>& requests, const Layout& layout);

}  // namespace verbatim::kv
