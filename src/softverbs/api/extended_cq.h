// Completion queues of ibv_create_cq_ex. The program polls one entry at a time and reads each field, and a timestamp,
// by a call.
#pragma once

#include <infiniband/verbs.h>

#include "base/result.h"
#include "softverbs/engine/context.h"
#include "softverbs/engine/cq.h"

namespace verbatim::softverbs {

// EOPNOTSUPP for fields or flags that reliable connections do not have.
Result<Cq*> create_extended_cq(Context& context, const ibv_cq_init_attr_ex& attributes);

}  // namespace verbatim::softverbs
