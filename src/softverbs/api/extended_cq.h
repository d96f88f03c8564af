// Completion queues made by ibv_create_cq_ex: polled one entry at a time, each field by a call, with timestamps.
#pragma once

#include <infiniband/verbs.h>

#include "base/result.h"
#include "softverbs/engine/objects.h"

namespace verbatim::softverbs {

// EOPNOTSUPP for fields or properties that no reliable connection has.
Result<Cq*> create_extended_cq(Context& context, const ibv_cq_init_attr_ex& attributes);

}  // namespace verbatim::softverbs
