// The ibv_wr_* interface: function calls between ibv_wr_start and ibv_wr_complete build work requests. For QPs that
// were created with IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.
#pragma once

#include <infiniband/verbs.h>

#include "base/result.h"
#include "softverbs/engine/qp.h"

namespace verbatim::softverbs {

// Creates a QP. EOPNOTSUPP for attributes or operations that are not supported.
Result<Qp*> create_extended_qp(Context& context, ibv_qp_init_attr_ex& wanted);

}  // namespace verbatim::softverbs
