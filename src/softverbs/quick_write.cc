#include "softverbs/quick_write.h"

#include "softverbs/completion.h"
#include "softverbs/copy.h"
#include "softverbs/faults.h"
#include "softverbs/memory.h"
#include "softverbs/requester.h"

namespace verbatim::softverbs {
namespace {

// Where the bytes come from; 0 when they may not be read.
std::uint64_t source_of(const Qp& qp, const Segment& segment, const ibv_send_wr& request) {
  const ibv_sge& sge = *request.sg_list;
  if ((request.send_flags & IBV_SEND_INLINE) != 0) return sge.length <= qp.cap.max_inline_data ? sge.addr : 0;
  return translate(segment, {KeyKind::kLocal, sge.lkey, qp.pd->handle, 0}, sge.addr, sge.length);
}

enum class Quick {
  kDone,
  kRefused,    // nothing was done
  kQueueFull,  // done, but its completion had no room
};

// The receiver's half. False: not the next packets of an established connection, or not allowed.
bool deliver(Qp& qp, SharedQp& peer, const Segment& segment, const ibv_send_wr& request, std::uint64_t source) {
  Requester& requester = qp.requester;
  const std::uint32_t bytes = request.sg_list->length;
  if (peer.qpn.load(std::memory_order_relaxed) != requester.dest_qpn ||
      peer.state.load(std::memory_order_relaxed) != IBV_QPS_RTS || peer.established == 0 ||
      peer.dest_qpn != qp.qp_num || peer.expected_psn != requester.psn || peer.path_mtu_bytes != requester.mtu_bytes ||
      (peer.access & IBV_ACCESS_REMOTE_WRITE) == 0) {
    return false;
  }
  const Region region{KeyKind::kRemote, request.wr.rdma.rkey, peer.pd, IBV_ACCESS_REMOTE_WRITE};
  const std::uint64_t target = translate(segment, region, request.wr.rdma.remote_addr, bytes);
  if (target == 0) return false;
  place_quickly(reinterpret_cast<std::byte*>(target), reinterpret_cast<const std::byte*>(source), bytes);
  const std::uint32_t mtu = requester.mtu_bytes;
  const std::uint32_t packets = bytes <= mtu ? 1 : (bytes + mtu - 1) / mtu;
  peer.expected_psn = requester.psn = (requester.psn + packets) & k24Bits;
  return true;
}

bool complete(Qp& qp, const ibv_send_wr& request, std::uint32_t position, Incarnation me) {
  if (!qp.signal_all && (request.send_flags & IBV_SEND_SIGNALED) == 0) return true;
  return push_filled(qp.process->view(), me, qp.shared->send_cq, false, false, [&](Cqe& entry) {
    entry = {.wr_id = request.wr_id,
             .timestamp_ns = 0,
             .qp_index = qp.index,
             .position = position,
             .byte_len = request.sg_list->length,
             .imm = 0,
             .qpn = qp.qp_num,
             .source_qpn = 0,
             .status = IBV_WC_SUCCESS,
             .opcode = IBV_WC_RDMA_WRITE,
             .wc_flags = 0,
             .reserved = 0};
  });
}

// With qp.execution held, and everything posted before executed: there is nothing that it would wait for.
Quick execute(Qp& qp, const ibv_send_wr& request, std::uint32_t position, Incarnation me) {
  Requester& requester = qp.requester;
  if (requester.sent != position || request.sg_list->length - std::uint64_t{1} >= requester.route.quick_bytes ||
      qp.current_state() != IBV_QPS_RTS) {
    return Quick::kRefused;
  }
  const Segment& segment = qp.process->segment();
  if (faults() != nullptr || segment.impaired.load(std::memory_order_relaxed) != 0) return Quick::kRefused;
  const std::uint64_t source = source_of(qp, segment, request);
  SharedQp& peer = *requester.route.qp;
  if (source == 0 || !peer.lock.try_lock(me)) return Quick::kRefused;
  const bool delivered = deliver(qp, peer, segment, request, source);
  peer.lock.unlock(me);
  if (!delivered) return Quick::kRefused;
  const bool completed = complete(qp, request, position, me);
  requester.sent = position + 1;
  qp.sends.executed.store(position + 1, std::memory_order_release);
  qp.sends.posted.store(position + 1, std::memory_order_release);
  return completed ? Quick::kDone : Quick::kQueueFull;
}

}  // namespace

bool write_quickly(Qp& qp, const ibv_send_wr& request) {
  if (request.opcode != IBV_WR_RDMA_WRITE || request.num_sge != 1) return false;
  const Incarnation me = qp.process->me();
  if (!qp.execution.try_lock(me)) return false;
  const Quick result = execute(qp, request, qp.sends.posted.load(std::memory_order_relaxed), me);
  if (result == Quick::kQueueFull) fail_for_full_cq(qp);
  qp.execution.unlock(me);
  return result != Quick::kRefused;
}

}  // namespace verbatim::softverbs
