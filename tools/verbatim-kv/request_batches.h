// Groups requests into batches for --mode nccl, where all ranks transfer one batch at a time. A batch has at most the
// requests that may be in flight, and every rank has blocks for all of them.
#pragma once

#include <cstddef>
#include <vector>

#include "verbatim-kv/layout.h"
#include "verbatim-kv/options.h"
#include "workload/kv/requests.h"

namespace verbatim::kv {

using RequestBatch = std::vector<const Request*>;

// Returns the same batches on every rank.
std::vector<RequestBatch> make_batches(const Options& options, const std::vector<Request>& requests,
                                       const Layout& layout);

}  // namespace verbatim::kv
