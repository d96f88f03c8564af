// One rank of a run through NCCL (--mode nccl, nccl-put). The caches are on a GPU, and there is one communicator per
// family. Each request is gathered, sent as one message and scattered; or each of its blocks is put from where it lies
// to its destination, without a kernel.
#pragma once

#include <memory>

#include "ranks/coordinator_connection.h"
#include "ranks/job.h"
#include "verbatim-kv/options.h"

namespace verbatim::kv {

std::unique_ptr<ranks::Rank> make_nccl_rank(const Options& options, ranks::CoordinatorConnection& coordinator);

}  // namespace verbatim::kv
