// The parts of an attempt to send a step: the bytes of the sender, the route to the peer, the outcome. The caller holds
// qp.execution.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "softverbs/engine/qp.h"
#include "softverbs/engine/responder.h"
#include "softverbs/faults/faults.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

// The most bytes of one step. Large enough that a message of 1 MiB is one system call while no other QP has work. Steps
// of a longer message let other QPs, and threads that destroy objects, run in between.
constexpr std::uint64_t kStepBytes = 1U << 20;
static_assert(kStepBytes % 4096 == 0, "a step holds whole packets of any MTU");

constexpr unsigned kYieldsForPeerLock = 64;

enum class Outcome {
  kProgress,  // this step is done, the message is not
  kDone,
  kNotReady,  // RNR NAK
  kLost,      // no response
  kBusy,      // the peer's QP is locked, its memory is not accessible yet, or copies must end first; nothing was sent
  kLater,     // a fault delays it until Requester::due_ns
  kFailed,    // see status
};

struct Attempt {
  Outcome outcome = Outcome::kDone;
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint32_t rnr_timer = 0;
  std::uint32_t packets = 0;
  bool is_begun = false;  // kProgress or kDone: the bytes are still being copied
};

inline Attempt failed(ibv_wc_status status) {
  return {Outcome::kFailed, status};
}
Attempt attempt_of(Response response);

inline const SendRequest& request_at(const Qp& qp, std::uint32_t position) {
  return qp.sends.requests[position & qp.sends.mask];
}
inline bool is_atomic(std::uint8_t opcode) {
  return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

// The sender's bytes of this step, checked against its memory regions. False: a region does not allow the access.
bool gather_local(const Qp& qp, std::uint32_t slot, const SendRequest& request, const Packets& packets, Spans& spans);

// kDone: the route is set and the peer's memory is accessible. kLost: no such peer. kBusy: not accessible yet.
Outcome find_peer(Qp& qp);

// Whether a fault keeps packets from passing between the two ports of the route.
bool is_unreachable(const Qp& qp, Faults* faults);
// The same without the faults of the target's own port: whether they do not get as far as that port.
bool is_lost_before_target(const Qp& qp, Faults* faults);

}  // namespace verbatim::softverbs
