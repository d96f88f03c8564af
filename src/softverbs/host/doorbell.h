// Wakes the engine threads of a process, also from another process.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

// Wakes an engine thread of the segment's process if one sleeps and none polls for work: waking takes microseconds.
inline void ring_doorbell(Segment& segment) {
  segment.doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (segment.polling.load(std::memory_order_seq_cst) != 0) return;
  if (segment.sleeping.load(std::memory_order_seq_cst) == 0) return;
  ::syscall(SYS_futex, &segment.doorbell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

// Asks the engine to look for requests of other processes: QPs that a peer moved to the error state, fault commands.
// The inline engine does so at its next verb.
inline void request_service(Segment& segment) {
  segment.service_pending.store(1, std::memory_order_seq_cst);
  ring_doorbell(segment);
}

}  // namespace verbatim::softverbs
