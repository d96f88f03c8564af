#include "softverbs/engine/deferred_writes.h"

#include "base/clock.h"
#include "softverbs/faults/faults.h"

namespace verbatim::softverbs {
namespace {

// Places one deferred payload. The caller holds the lock of the peer's QP.
Attempt place_one(const Qp& qp, const DeferredPayload& payload, Response& response) {
  const SendRequest& request = request_at(qp, payload.position);
  Packets packets{};
  packets.opcode = static_cast<ibv_wr_opcode>(request.opcode);
  packets.message_bytes = request.length;
  packets.offset = payload.offset;
  packets.bytes = payload.bytes;
  packets.remote_address = request.remote_address;
  packets.rkey = request.rkey;
  Spans local;
  if (!gather_local(qp, payload.position & qp.sends.mask, request, packets, local)) return failed(IBV_WC_LOC_PROT_ERR);
  const Route& route = qp.requester.route;
  response = place_payload(*route.process, qp.process->me(), route.index, packets, local);
  return attempt_of(response);
}

// Whether the peer's QP is unchanged since it acknowledged the payloads. `may_have_failed`: a later request may have
// moved it to the error state after it had acknowledged them.
bool accepts_deferred(const Qp& qp, bool may_have_failed) {
  const SharedQp& peer = *qp.requester.route.qp;
  const std::uint32_t state = peer.state.load(std::memory_order_relaxed);
  return peer.qpn.load(std::memory_order_relaxed) == qp.requester.dest_qpn &&
         (state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD ||
          (may_have_failed && state == IBV_QPS_ERR)) &&
         is_expected(peer, qp.qp_num, qp.requester.deferred_psn);
}

}  // namespace

bool may_defer(const Qp& qp, const SendRequest& request, std::uint64_t end) {
  if (!qp.deferred.is_enabled()) return false;
  return request.opcode == IBV_WR_RDMA_WRITE || (request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && end != request.length);
}

void defer_payload(Qp& qp, const Packets& packets) {
  if (!has_deferred_work(qp)) qp.deferred.choose_deadline(monotonic_ns());
  qp.deferred.add(qp.requester.sent, packets.remote_address + packets.offset, packets.offset, packets.bytes);
}

void place_some_deferred(Qp& qp) {
  while (!qp.deferred.empty() && qp.deferred.random_bool()) {
    const DeferredPayload payload = qp.deferred.take_random();
    Response response = Response::kAck;
    if (place_one(qp, payload, response).outcome == Outcome::kDone) continue;
    qp.deferred.put_back(payload);
    return;
  }
}

bool may_program_sleep(const Qp& qp) {
  return !qp.process->settings().threaded &&
         static_cast<const Cq*>(qp.send_cq)->shared->armed.load(std::memory_order_seq_cst) != Armed::kNo;
}

bool is_deferred_due(Qp& qp, bool more_to_send) {
  if (qp.deferred.is_full()) return true;
  if (qp.process->settings().threaded) return qp.deferred.is_deadline_passed(monotonic_ns());
  return !more_to_send && (may_program_sleep(qp) || qp.deferred.is_last_poll());
}

Attempt place_all_deferred(Qp& qp, bool may_have_failed, std::uint32_t& failing) {
  if (const Outcome found = find_peer(qp); found != Outcome::kDone) return {found};
  const Route& route = qp.requester.route;
  const Incarnation me = qp.process->me();
  if (!route.qp->lock.lock_within(me, kYieldsForPeerLock)) return {Outcome::kBusy};
  Attempt result{};
  Response refusal = Response::kAck;
  if (!accepts_deferred(qp, may_have_failed) || is_unreachable(qp, softverbs::faults()))
    result.outcome = Outcome::kLost;
  while (result.outcome != Outcome::kLost && !qp.deferred.empty()) {
    const DeferredPayload payload = qp.deferred.take_random();
    if (result.outcome == Outcome::kFailed && static_cast<std::int32_t>(payload.position - failing) >= 0) continue;
    Response response = Response::kAck;
    const Attempt placed = place_one(qp, payload, response);
    if (placed.outcome == Outcome::kDone) continue;
    result = placed;
    failing = payload.position;
    refusal = response;
    if (placed.outcome == Outcome::kLost) qp.deferred.put_back(payload);
  }
  if (result.outcome == Outcome::kFailed && refusal >= Response::kInvalidRequest) {
    refuse_request(*route.process, me, route.index, refusal);
  }
  route.qp->lock.unlock(me);
  return result;
}

}  // namespace verbatim::softverbs
