// Deferred WRITEs: their payload reaches memory after they were acknowledged (see deferred_payloads.h). This file
// decides which payloads are deferred and places them; the requester decides when. The caller holds qp.execution.
#pragma once

#include <cstdint>

#include "softverbs/engine/attempt.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/responder.h"

namespace verbatim::softverbs {

// Whether a request was sent that is not complete, because its payload may be deferred.
inline bool has_deferred_work(const Qp& qp) {
  return qp.deferred.is_enabled() &&
         (qp.requester.sent != qp.sends.executed.load(std::memory_order_relaxed) || !qp.deferred.empty());
}

// Whether the payload of the step that ends at byte `end` of its message may be deferred.
bool may_defer(const Qp& qp, const SendRequest& request, std::uint64_t end);
// Defers the payload of a step.
void defer_payload(Qp& qp, const Packets& packets);
// Places a random selection of the deferred payloads. The caller holds the lock of the peer's QP. A payload that cannot
// be placed stays deferred; place_all_deferred reports the failure.
void place_some_deferred(Qp& qp);

// Whether the program may be waiting for an event. With the inline engine nothing completes while it waits.
bool may_program_sleep(const Qp& qp);
// Whether all deferred payloads must be placed now.
bool is_deferred_due(Qp& qp, bool more_to_send);
// Places all deferred payloads in random order. `failing`: set to the position of the first request that fails.
Attempt place_all_deferred(Qp& qp, bool may_have_failed, std::uint32_t& failing);

}  // namespace verbatim::softverbs
