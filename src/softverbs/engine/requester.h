// The requester half of a connection: executes posted work requests in order. One call executes one bounded step of one
// request. Every step passes through transmit(), where ordering, faults, arbitration and counters apply.
#pragma once

#include <cstdint>

#include "softverbs/engine/qp.h"

namespace verbatim::softverbs {

enum class Step {
  kIdle,          // nothing to do in this state
  kMore,          // call again soon
  kPoll,          // copies are under way: call again soon, after other QPs
  kWait,          // call again at Requester::due_ns
  kWaitDeferred,  // call again when there is more to send, or at the deadline of the deferred payloads; with the inline
                  // engine at the next poll
};

// Executes one step. The caller holds qp.execution. Subtracts the bytes of the step from `quantum`, down to 0.
Step advance(Qp& qp, std::uint64_t& quantum);

// Moves the QP to the error state and flushes both queues. The caller holds qp.execution.
void fail_own_qp(Qp& qp);
// The same for a completion that found its CQ full, and raises IBV_EVENT_QP_FATAL.
void fail_for_full_cq(Qp& qp);

}  // namespace verbatim::softverbs
