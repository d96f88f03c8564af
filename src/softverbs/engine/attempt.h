// What every attempt to bring something to the peer is made of: the sender's own bytes, the way to the peer, and what
// came of it. Called with qp.execution held.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "softverbs/engine/qp.h"
#include "softverbs/engine/responder.h"
#include "softverbs/faults/faults.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

// The most bytes of one step. A message of 1 MiB is one system call while nobody else has something to send; a longer
// one lets other QPs and destroyers in between.
constexpr std::uint64_t kStepBytes = 1U << 20;
static_assert(kStepBytes % 4096 == 0, "a step holds whole packets of any MTU");

constexpr unsigned kYieldsForPeerLock = 64;

enum class Outcome {
  kProgress,  // this step is done, the message is not
  kDone,
  kNotReady,  // RNR NAK
  kLost,      // no answer
  kBusy,      // the receiving side is being changed or is stopped; the request was not sent
  kLater,     // a fault holds it up until Requester::due_ns
  kFailed,    // see status
};

struct Attempt {
  Outcome outcome = Outcome::kDone;
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint32_t rnr_timer = 0;
  std::uint32_t packets = 0;
};

inline Attempt failed(ibv_wc_status status) {
  return {Outcome::kFailed, status, 0, 0};
}
Attempt attempt_of(Response response);

inline const SendRequest& request_at(const Qp& qp, std::uint32_t position) {
  return qp.sends.requests[position & qp.sends.mask];
}
inline bool is_atomic(std::uint8_t opcode) {
  return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

// The sender's bytes of this step, checked against its own memory regions. False: not all of them may be used.
bool gather_local(const Qp& qp, std::uint32_t slot, const SendRequest& request, const Packets& packets, Spans& places);

// kDone: the route leads to the peer, whose memory can be reached. kLost: nobody is there. kBusy: not yet.
Outcome find_peer(Qp& qp);

// Whether nothing passes between the two ports of the route.
bool is_unreachable(const Qp& qp, Faults* faults);

}  // namespace verbatim::softverbs
