// The half of a connection that asks: executes posted work requests in order. One call does one bounded step of one
// request; ordering, faults, arbitration and counters have their place in `transmit`, which every step passes.
#pragma once

#include <cstdint>

#include "softverbs/engine/qp.h"

namespace verbatim::softverbs {

enum class Step {
  kIdle,          // nothing to do in this state
  kMore,          // call again soon
  kWait,          // call again at Requester::due_ns
  kWaitDeferred,  // call again when there is more to send, or else at the end of LatePayloads; without a thread, at a
                  // poll
};

// With qp.execution held. Subtracts the bytes that the step moved from `quantum`, down to 0.
Step advance(Qp& qp, std::uint64_t& quantum);

// Puts the QP into the error state from its own side and flushes both queues; with qp.execution held.
void fail_own_qp(Qp& qp);
// The same when a completion found no room, with the event that says so.
void fail_for_full_cq(Qp& qp);

}  // namespace verbatim::softverbs
