// The common case of a program that tests against itself: a WRITE of one piece, between two QPs of this process, about
// which there is nothing to decide. It passes the same checks as any other request, in one go, and never enters the
// send queue; where one of them does not simply hold, nothing is done, and the request takes the long way.
#pragma once

#include "softverbs/qp.h"

namespace verbatim::softverbs {

// Posts and executes in one; there must be room in the send queue. False: nothing was done. For the inline engine.
bool write_quickly(Qp& qp, const ibv_send_wr& request) VERBATIM_REQUIRES(qp.sends.mutex);

}  // namespace verbatim::softverbs
