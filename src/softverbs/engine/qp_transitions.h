// The state transitions of each QP type and the attributes that each requires and allows: the tables of the InfiniBand
// specification (modify QP, volume 1, 11.2.5.2), as in ibv_modify_qp(3) and Linux (qp_state_table).
#pragma once

#include <infiniband/verbs.h>

namespace verbatim::softverbs {

// Whether `mask` allows this transition: it contains every required attribute, and besides them only optional ones.
bool is_transition_allowed(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to, int mask);

}  // namespace verbatim::softverbs
