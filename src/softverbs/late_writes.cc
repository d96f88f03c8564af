#include "softverbs/late_writes.h"

#include "base/clock.h"
#include "softverbs/faults.h"

namespace verbatim::softverbs {
namespace {

// Brings one late payload to memory; with the peer's lock held.
Attempt place(const Qp& qp, const LatePayload& payload, Answer& answer) {
  const SendRequest& request = request_at(qp, payload.position);
  Packets packets{};
  packets.opcode = static_cast<ibv_wr_opcode>(request.opcode);
  packets.message_bytes = request.length;
  packets.offset = payload.offset;
  packets.bytes = payload.bytes;
  packets.remote_address = request.remote_address;
  packets.rkey = request.rkey;
  Spans local;
  if (!local_places(qp, payload.position & qp.sends.mask, request, packets, local)) return failed(IBV_WC_LOC_PROT_ERR);
  const Route& route = qp.requester.route;
  answer = place_payload(*route.process, qp.process->me(), route.index, packets, local);
  return attempt_of(answer);
}

// Whether the peer still is where the late payloads found it. One that failed over what came behind them took them.
bool would_take_late(const Qp& qp, bool may_have_failed) {
  const SharedQp& peer = *qp.requester.route.qp;
  const std::uint32_t state = peer.state.load(std::memory_order_relaxed);
  return peer.qpn.load(std::memory_order_relaxed) == qp.requester.dest_qpn &&
         (state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD ||
          (may_have_failed && state == IBV_QPS_ERR)) &&
         is_expected(peer, qp.qp_num, qp.requester.late_psn);
}

}  // namespace

bool is_sent_late(const Qp& qp, const SendRequest& request, std::uint64_t end) {
  if (!qp.late.is_enabled()) return false;
  return request.opcode == IBV_WR_RDMA_WRITE || (request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && end != request.length);
}

void remember_late(Qp& qp, const Packets& packets) {
  if (!is_anything_late(qp)) qp.late.choose_end(monotonic_ns());
  qp.late.add(qp.requester.sent, packets.remote_address + packets.offset, packets.offset, packets.bytes);
}

void place_some_late(Qp& qp) {
  while (!qp.late.empty() && qp.late.toss()) {
    const LatePayload payload = qp.late.take_any();
    Answer answer = Answer::kAck;
    if (place(qp, payload, answer).outcome == Outcome::kDone) continue;
    qp.late.put_back(payload);
    return;
  }
}

bool is_sleep_announced(const Qp& qp) {
  return !qp.process->settings().threaded &&
         static_cast<const Cq*>(qp.send_cq)->shared->armed.load(std::memory_order_seq_cst) != Armed::kNo;
}

bool is_late_due(Qp& qp, bool more_to_send) {
  if (qp.late.is_full()) return true;
  if (qp.process->settings().threaded) return qp.late.is_over(monotonic_ns());
  return !more_to_send && (is_sleep_announced(qp) || qp.late.is_last_look());
}

Attempt place_all_late(Qp& qp, bool may_have_failed, std::uint32_t& failing) {
  if (const Outcome found = find_peer(qp); found != Outcome::kDone) return {found};
  const Route& route = qp.requester.route;
  const Incarnation me = qp.process->me();
  if (!route.qp->lock.lock_within(me, kYieldsForPeerLock)) return {Outcome::kBusy};
  Attempt result{};
  Answer refusal = Answer::kAck;
  if (!would_take_late(qp, may_have_failed) || is_cut_off(qp, softverbs::faults())) result.outcome = Outcome::kLost;
  while (result.outcome != Outcome::kLost && !qp.late.empty()) {
    const LatePayload payload = qp.late.take_any();
    if (result.outcome == Outcome::kFailed && static_cast<std::int32_t>(payload.position - failing) >= 0) continue;
    Answer answer = Answer::kAck;
    const Attempt placed = place(qp, payload, answer);
    if (placed.outcome == Outcome::kDone) continue;
    result = placed;
    failing = payload.position;
    refusal = answer;
    if (placed.outcome == Outcome::kLost) qp.late.put_back(payload);
  }
  if (result.outcome == Outcome::kFailed && refusal != Answer::kAck) {
    refuse_request(*route.process, me, route.index, refusal);
  }
  route.qp->lock.unlock(me);
  return result;
}

}  // namespace verbatim::softverbs
