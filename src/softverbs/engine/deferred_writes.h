// WRITEs whose payload comes to memory later than they are answered (see ordering.h): which ones, and how they are
// brought there. When that must be is the requester's business. Called with qp.execution held.
#pragma once

#include <cstdint>

#include "softverbs/engine/attempt.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/responder.h"

namespace verbatim::softverbs {

// Something was sent whose payload may be late: its requests are not complete.
inline bool has_deferred_work(const Qp& qp) {
  return qp.requester.sent != qp.sends.executed.load(std::memory_order_relaxed) || !qp.deferred.empty();
}

// Whether the payload of the step that ends at `end` of its message may come later than the step.
bool may_defer(const Qp& qp, const SendRequest& request, std::uint64_t end);
// Keeps the payload of a step for later.
void defer_payload(Qp& qp, const Packets& packets);
// Some of the late payloads come early, in any order; with the peer's lock held. What fails is told in the end.
void place_some_deferred(Qp& qp);

// Without a thread nobody completes anything while the program sleeps until a completion wakes it.
bool may_program_sleep(const Qp& qp);
// Whether everything late must come now.
bool is_deferred_due(Qp& qp, bool more_to_send);
// Brings everything late to memory, in any order. `failing`: the first request that could not be completed.
Attempt place_all_deferred(Qp& qp, bool may_have_failed, std::uint32_t& failing);

}  // namespace verbatim::softverbs
