// NCCL's profiler callback, as the transport calls it.
#pragma once

#include "nccl/profiler_net_ib.h"
#include "nccl/types.h"
#include "net/transfer/profiler_events.h"

namespace verbatim::abi {

// A table without profiler, and an NCCL that has none, pass nullptr.
Profiler profiler_of(nccl::ProfilerCallback callback);

}  // namespace verbatim::abi
