// ibv_post_send: appends requests to the send queue, or executes a WRITE immediately on a fast path.
#include <cerrno>
#include <cstring>

#include "softverbs/engine/call.h"
#include "softverbs/engine/completion_queue.h"
#include "softverbs/engine/datagrams.h"
#include "softverbs/engine/memory_region.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/requester.h"
#include "softverbs/gpu/gpu_address.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {
namespace {

bool is_full(const Qp& qp, std::uint32_t posted) {
  return posted - qp.sends.released.load(std::memory_order_acquire) >= qp.cap.max_send_wr;
}

// Fills the entry at `slot` from a request. Returns 0 or an errno.
int fill_request(Qp& qp, const ibv_send_wr& from, std::uint32_t slot) {
  if (from.num_sge < 0 || static_cast<std::uint32_t>(from.num_sge) > qp.cap.max_send_sge) return EINVAL;
  const bool is_inline = (from.send_flags & IBV_SEND_INLINE) != 0;
  SendRequest& to = qp.sends.requests[slot];
  to.wr_id = from.wr_id;
  to.opcode = static_cast<std::uint8_t>(from.opcode);
  to.flags = static_cast<std::uint8_t>(from.send_flags);
  to.imm = from.imm_data;
  // With SOFTVERBS_EMPTY_WRITE=first-sge such a WRITE has a segment, as with rdma-core's irdma.
  const bool sends_first = from.num_sge == 0 && from.opcode == IBV_WR_RDMA_WRITE && from.sg_list != nullptr &&
                           qp.process->settings().first_sge;
  const int sges_given = sends_first ? 1 : from.num_sge;
  to.sge_count = static_cast<std::uint32_t>(sges_given);
  to.arrival = qp.process->next_arrival();
  to.length = 0;
  for (int i = 0; i < sges_given; ++i) to.length += from.sg_list[i].length;
  switch (from.opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
      if (qp.qp_type != IBV_QPT_UD) break;
      if (const int error =
              set_datagram_address(qp, slot, from.wr.ud.ah, from.wr.ud.remote_qpn, from.wr.ud.remote_qkey);
          error != 0) {
        return error;
      }
      break;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      if (qp.qp_type == IBV_QPT_UD) return EINVAL;
      to.remote_address = from.wr.rdma.remote_addr;
      to.rkey = from.wr.rdma.rkey;
      break;
    case IBV_WR_RDMA_READ:
      if (is_inline || qp.qp_type != IBV_QPT_RC) return EINVAL;
      to.remote_address = from.wr.rdma.remote_addr;
      to.rkey = from.wr.rdma.rkey;
      break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      if (is_inline || qp.qp_type != IBV_QPT_RC) return EINVAL;
      to.remote_address = from.wr.atomic.remote_addr;
      to.rkey = from.wr.atomic.rkey;
      to.compare_add = from.wr.atomic.compare_add;
      to.swap = from.wr.atomic.swap;
      break;
    default:
      return EINVAL;
  }
  if (!is_inline) {
    ibv_sge* const sges = &qp.sends.sges[std::size_t{slot} * qp.cap.max_send_sge];
    for (int i = 0; i < sges_given; ++i) sges[i] = from.sg_list[i];
    return 0;
  }
  if (to.length > qp.cap.max_inline_data) return EINVAL;
  std::uint8_t* bytes = &qp.sends.inline_bytes[std::size_t{slot} * qp.cap.max_inline_data];
  for (int i = 0; i < sges_given; ++i) {
    const ibv_sge& sge = from.sg_list[i];
    std::memcpy(bytes, reinterpret_cast<const void*>(sge.addr), sge.length);
    bytes += sge.length;
  }
  return 0;
}

// The address of the source bytes. 0 when the lkey does not allow the access, or when inline data is longer than
// max_inline_data.
std::uint64_t source_of(const Qp& qp, const Segment& segment, const ibv_send_wr& request) {
  const ibv_sge& sge = *request.sg_list;
  if ((request.send_flags & IBV_SEND_INLINE) != 0) return sge.length <= qp.cap.max_inline_data ? sge.addr : 0;
  return translate(segment, {KeyKind::kLocal, sge.lkey, qp.pd->handle, 0}, sge.addr, sge.length);
}

enum class FastPathResult {
  kDone,
  kRefused,    // the request was not executed
  kQueueFull,  // the request was executed, but the CQ had no free entry for its completion
};

// What the responder does for a WRITE on the fast path. Returns false, and changes nothing, when the peer QP is not in
// RTS, is not connected to this QP or expects another PSN, when it has executed no packet since RESET, when the path
// MTUs differ, when the rkey or the access flags do not allow the WRITE, or when it goes to GPU memory.
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
  if (target == 0 || is_gpu_address(target)) return false;
  copy_word(reinterpret_cast<std::byte*>(target), reinterpret_cast<const std::byte*>(source), bytes);
  const std::uint32_t mtu = requester.mtu_bytes;
  const std::uint32_t packets = bytes <= mtu ? 1 : (bytes + mtu - 1) / mtu;
  peer.expected_psn = requester.psn = (requester.psn + packets) & k24Bits;
  return true;
}

bool complete(Qp& qp, const ibv_send_wr& request, std::uint32_t position, Incarnation me) {
  if (!qp.signal_all && (request.send_flags & IBV_SEND_SIGNALED) == 0) return true;
  return push_filled(qp.process->view(), me, qp.shared->send_cq, false, false, [&](Cqe& entry) {
    entry.wr_id = request.wr_id;
    entry.qp_index = qp.index;
    entry.position = position;
    entry.byte_len = request.sg_list->length;
    entry.imm = 0;
    entry.qpn = qp.qp_num;
    entry.source_qpn = 0;
    entry.status = IBV_WC_SUCCESS;
    entry.opcode = IBV_WC_RDMA_WRITE;
    entry.wc_flags = 0;
    entry.reserved = 0;
    entry.slid = 0;
    entry.sl = 0;
    entry.dlid_path_bits = 0;
  });
}

// The caller holds qp.execution. Returns kRefused, and changes nothing, when an earlier request is still to be sent or
// any other check fails.
FastPathResult execute(Qp& qp, const ibv_send_wr& request, std::uint32_t position, Incarnation me) {
  Requester& requester = qp.requester;
  // The check of the length also refuses length 0, which wraps around.
  if (requester.sent != position || request.sg_list->length - std::uint64_t{1} >= requester.route.fast_path_bytes ||
      qp.current_state() != IBV_QPS_RTS) {
    return FastPathResult::kRefused;
  }
  const Segment& segment = qp.process->segment();
  if (faults() != nullptr)
    return FastPathResult::kRefused;  // faults() is set also while a port of this process is down
  const std::uint64_t source = source_of(qp, segment, request);
  SharedQp& peer = *requester.route.qp;
  if (source == 0 || is_gpu_address(source) || !peer.lock.try_lock(me)) return FastPathResult::kRefused;
  const bool delivered = deliver(qp, peer, segment, request, source);
  peer.lock.unlock(me);
  if (!delivered) return FastPathResult::kRefused;
  const bool completed = complete(qp, request, position, me);
  requester.sent = position + 1;
  qp.sends.executed.store(position + 1, std::memory_order_release);
  qp.sends.posted.store(position + 1, std::memory_order_release);
  return completed ? FastPathResult::kDone : FastPathResult::kQueueFull;
}

// The fast path executes a WRITE of one SGE between two QPs of this process without filling an entry of the send queue.
// The WRITE passes the same checks as any other request. When a check fails, nothing is done and the request takes the
// normal path, which reports the error. The WRITE occupies a position in the send queue until the position is released,
// so it needs a free entry. The fast path is used with the inline engine only.
bool write_fast(Qp& qp, const ibv_send_wr& request) VERBATIM_REQUIRES(qp.sends.mutex) {
  const std::uint32_t position = qp.sends.posted.load(std::memory_order_relaxed);
  if (request.opcode != IBV_WR_RDMA_WRITE || request.num_sge != 1 || is_full(qp, position)) return false;
  const Incarnation me = qp.process->me();
  if (!qp.execution.try_lock(me)) return false;
  const FastPathResult result = execute(qp, request, position, me);
  if (result == FastPathResult::kQueueFull) fail_for_full_cq(qp);
  qp.execution.unlock(me);
  return result != FastPathResult::kRefused;
}

// Posts a single request on the fast path. Returns false when nothing was done.
bool post_fast(Qp& qp, Engine& engine, const ibv_send_wr* request) {
  if (request == nullptr || request->next != nullptr || !engine.enter()) return false;
  bool done = false;
  {
    FutexLock lock(qp.sends.mutex);
    done = write_fast(qp, *request);
    if (done) {
      SendCounters& counters = qp.shared->counters.sends;
      counters.posts.add(1);
      count_request(counters, IBV_WR_RDMA_WRITE, request->sg_list->length, request->send_flags);
    }
  }
  engine.leave();
  return done;
}

}  // namespace

int post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** bad) {
  Qp& qp = *static_cast<Qp*>(handle);
  if (const int refused = begin_data_call(kPostSendCall, qp.shared->device); refused != 0) {
    *bad = request;
    return refused;
  }
  const ibv_qp_state state = qp.current_state();
  if (state == IBV_QPS_RESET || state == IBV_QPS_INIT || state == IBV_QPS_RTR) {
    *bad = request;
    return EINVAL;
  }
  Engine& engine = qp.process->engine();
  if (!engine.is_threaded() && post_fast(qp, engine, request)) return 0;
  int error = 0;
  {
    FutexLock lock(qp.sends.mutex);
    SendCounters& counters = qp.shared->counters.sends;
    counters.posts.add(1);
    std::uint32_t posted = qp.sends.posted.load(std::memory_order_relaxed);
    for (; request != nullptr; request = request->next) {
      error = is_full(qp, posted) ? ENOMEM : fill_request(qp, *request, posted & qp.sends.mask);
      if (error != 0) {
        *bad = request;
        break;
      }
      const SendRequest& filled = qp.sends.requests[posted & qp.sends.mask];
      count_request(counters, filled.opcode, filled.length, filled.flags);
      ++posted;
    }
    qp.sends.posted.store(posted, std::memory_order_release);
  }
  engine.submit(qp);
  return error;
}

}  // namespace verbatim::softverbs
