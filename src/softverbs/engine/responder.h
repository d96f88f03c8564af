// The responder half of a connection. The sender's thread executes it, on the state that the receiving process keeps in
// its segment.
#pragma once

#include <infiniband/verbs.h>

#include "softverbs/engine/packets.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

enum class Response {
  kAck,
  kDuplicateAck,      // of a SEND or WRITE that was executed before
  kNoResponse,        // no such QP, wrong state, another peer's QP, or out of sequence
  kBegun,             // the bytes of a WRITE are being copied; finish_copied_write() does the rest
  kAfterCopies,       // copies of earlier WRITEs must end first; nothing was done
  kReceiverNotReady,  // RNR NAK; see SharedQp::min_rnr_timer
  kSourceFault,       // the sender's memory cannot be read; nothing was done
  kInvalidRequest,
  kAccessError,
  kOperationalError,
};

// Executes one step. `local`: the sender's memory, the source of SEND and WRITE, the destination of READ and atomics.
// The caller holds the lock of the QP. A response from kInvalidRequest on has moved the QP to the error state.
Response respond(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                 Spans& local);

// Executes one step for a QP without acknowledgements. A message that cannot be executed is dropped: any response
// except kAck. Only an error of the receive request itself moves the QP to the error state. The caller holds the lock
// of the QP.
Response respond_unreliably(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                            Spans& local);

// Delivers a datagram to a UD QP, in the same way. The first bytes of the receive are for the GRH.
Response receive_datagram(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                          const DatagramHeader& header, Spans& local);

// Whether the QP expects this sequence number from that sender. The caller holds the lock of the QP.
bool is_expected(const SharedQp& qp, std::uint32_t source_qpn, std::uint32_t psn);

// Notes that these packets got no response, because the port or the QP had failed. The caller holds the lock of the QP.
void note_unexecuted(SharedQp& qp, const Packets& packets);

// Places bytes of a WRITE that was acknowledged before. kAck, kNoResponse, or the error, which the caller passes to
// refuse_request. The caller holds the lock of the QP.
Response place_payload(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                       Spans& local);
// Delivers the immediate of a WRITE whose bytes are in memory now, or refuses a WRITE that could not be copied. The
// caller holds the lock of the QP.
Response finish_copied_write(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                             bool is_copied);
void refuse_request(const ProcessView& process, Incarnation me, std::uint32_t qp_index, Response response);

// Moves a QP to the error state and flushes its receive queue; in the error state, flushes what is left. The caller is
// the owner or a peer and holds the lock of the QP. The owner's engine flushes the send queue.
void fail_qp(const ProcessView& process, Incarnation me, std::uint32_t qp_index);

// The first half of fail_qp; flush_receives is the other one. Between them the caller reports the failure by a
// completion or an event. If the caller dies in between, the owner's engine does the rest: enter_error_state has
// requested its service.
void enter_error_state(const ProcessView& process, std::uint32_t qp_index);

// Whether the device is to flush this QP in the error state later (SOFTVERBS_FLUSH=late). Then the owner's engine does
// it.
bool is_flush_late(const SharedQp& qp);
// Flushes the receive queue of a QP in the error state, unless that is late, and raises
// IBV_EVENT_QP_LAST_WQE_REACHED. The caller holds the lock of the QP.
void flush_receives(const ProcessView& process, Incarnation me, std::uint32_t qp_index);

void raise_qp_event(const ProcessView& process, Incarnation me, std::uint32_t qp_index, ibv_event_type type);

}  // namespace verbatim::softverbs
