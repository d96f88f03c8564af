// The states of a reliable connection and the attributes that each step between them demands and allows: the tables of
// the InfiniBand specification (modify QP, volume 1, 11.2.5.2), as ibv_modify_qp(3) restates them.
#pragma once

#include <infiniband/verbs.h>

namespace verbatim::softverbs {

// Whether `mask` may take a QP from one state to another: every required attribute is there, no other than the
// optional ones beside them.
bool is_transition_allowed(ibv_qp_state from, ibv_qp_state to, int mask);

}  // namespace verbatim::softverbs
