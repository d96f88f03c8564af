// The half of a connection that answers: executed by whoever sends, in the sender's thread, on the state that the
// receiving process keeps in its segment.
#pragma once

#include <infiniband/verbs.h>

#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

// One step of a message: a run of packets.
struct Packets {
  ibv_wr_opcode opcode;
  std::uint32_t source_qpn;
  std::uint32_t psn;    // of the first
  std::uint32_t count;  // packets in this step, 1 for an empty message
  std::uint32_t mtu_bytes;
  std::uint64_t message_bytes;  // of the whole message
  std::uint64_t offset;         // of this step in it
  std::uint64_t bytes;          // of this step
  std::uint64_t remote_address;
  std::uint64_t compare_add;
  std::uint64_t swap;
  std::uint32_t rkey;
  std::uint32_t imm;
  bool solicited;
  bool is_deferred;  // a WRITE whose payload place_payload() brings later

  bool is_first() const { return offset == 0; }
  bool is_last() const { return offset + bytes == message_bytes; }
};

enum class Response {
  kAck,
  kDuplicateAck,      // of a SEND or WRITE that was executed before
  kNoResponse,        // nobody answers: no such QP, not ready, another peer's, out of sequence
  kReceiverNotReady,  // see SharedQp::min_rnr_timer
  kInvalidRequest,
  kAccessError,
  kOperationalError,
};

// Executes one step. `local` holds the sender's side of the bytes: the source of SEND and WRITE, the destination of
// READ and atomics. Called with qp.lock held; any answer from kInvalidRequest on has put the QP into the error state.
Response respond(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                 Spans& local);

// Whether the QP would take a packet from that sender, of that sequence number, as its next one. With qp.lock held.
bool is_expected(const SharedQp& qp, std::uint32_t source_qpn, std::uint32_t psn);

// Brings the bytes of a WRITE that was answered before. kAck, kSilence, or what is wrong by now: the caller refuses.
// With qp.lock held.
Response place_payload(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                       Spans& local);
void refuse_request(const ProcessView& process, Incarnation me, std::uint32_t qp_index, Response response);

// Puts a QP into the error state and flushes its receive queue; if it is there already, flushes what is left. Called
// with qp.lock held, by the owner or by a peer. The owner's send queue is flushed by its engine.
void fail_qp(const ProcessView& process, Incarnation me, std::uint32_t qp_index);

// The two halves of fail_qp; between them the failure itself is told, by a completion or an event. A caller that dies
// in the middle leaves the rest to the owner's engine, which is called first.
bool enter_error_state(const ProcessView& process, std::uint32_t qp_index);  // false: it was there already
void finish_failure(const ProcessView& process, Incarnation me, std::uint32_t qp_index, bool entered);

// Completes with a flush error what waits in the receive queue of a QP in the error state; with qp.lock held.
void flush_receives(const ProcessView& process, Incarnation me, std::uint32_t qp_index);

void raise_qp_event(const ProcessView& process, Incarnation me, std::uint32_t qp_index, ibv_event_type type);

}  // namespace verbatim::softverbs
