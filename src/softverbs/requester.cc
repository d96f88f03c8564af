#include "softverbs/requester.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/clock.h"
#include "softverbs/completion.h"
#include "softverbs/copy.h"
#include "softverbs/faults.h"
#include "softverbs/memory.h"
#include "softverbs/responder.h"

namespace verbatim::softverbs {
namespace {

// Bytes of one step. A message of 1 MiB is one system call; a longer one lets other QPs and destroyers in between.
constexpr std::uint64_t kStepBytes = 1U << 20;
static_assert(kStepBytes % 4096 == 0, "a step holds whole packets of any MTU");

constexpr std::uint32_t kInfiniteRnrRetries = 7;
constexpr std::uint64_t kNoTimeoutPollNs = kNanosecondsPerMillisecond;  // with timeout 0 nothing is ever given up
constexpr std::uint64_t kBusyPauseNs = 50'000;
constexpr unsigned kYieldsForPeerLock = 64;

// The RNR NAK timer field in units of 10 us (InfiniBand specification, volume 1, table 45).
constexpr std::array<std::uint32_t, 32> kRnrTimers{
    65536, 1,   2,   3,   4,    6,    8,    12,   16,   24,   32,   48,    64,    96,    128,   192,
    256,   384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
constexpr std::uint64_t kRnrTimerUnitNs = 10'000;

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

Attempt failed(ibv_wc_status status) {
  return {Outcome::kFailed, status, 0, 0};
}

ibv_wc_opcode completion_opcode(std::uint8_t opcode) {
  switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
      return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
      return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      return IBV_WC_FETCH_ADD;
    default:
      return IBV_WC_SEND;
  }
}

bool is_atomic(std::uint8_t opcode) {
  return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

bool is_request_waiting(const Qp& qp) {
  return qp.sends.executed.load(std::memory_order_relaxed) != qp.sends.posted.load(std::memory_order_acquire);
}

// The sender's bytes of this step, checked against its own memory regions.
bool local_places(const Qp& qp, std::uint32_t slot, const SendRequest& request, const Packets& packets, Spans& places) {
  if ((request.flags & IBV_SEND_INLINE) != 0) {
    const std::uint8_t* bytes = &qp.sends.inline_bytes[std::size_t{slot} * qp.cap.max_inline_data];
    places.add(reinterpret_cast<std::uintptr_t>(bytes) + packets.offset, packets.bytes);
    return true;
  }
  const bool is_written = request.opcode == IBV_WR_RDMA_READ || is_atomic(request.opcode);
  const std::uint32_t access = is_written ? std::uint32_t{IBV_ACCESS_LOCAL_WRITE} : 0;
  const ibv_sge* sges = &qp.sends.sges[std::size_t{slot} * std::max(qp.cap.max_send_sge, 1U)];
  std::uint64_t skip = packets.offset;
  std::uint64_t left = packets.bytes;
  for (std::uint32_t i = 0; i < request.sge_count && left > 0; ++i) {
    if (skip >= sges[i].length) {
      skip -= sges[i].length;
      continue;
    }
    const std::uint64_t bytes = std::min<std::uint64_t>(sges[i].length - skip, left);
    const std::uint64_t begin = translate(qp.process->segment(), {KeyKind::kLocal, sges[i].lkey, qp.pd->handle, access},
                                          sges[i].addr + skip, bytes);
    if (begin == 0) return false;
    places.add(begin, bytes);
    skip = 0;
    left -= bytes;
  }
  return true;
}

// Whether the port that the QP sits on is the one that the path leads to.
bool is_addressed(const ProcessView& process, std::uint32_t device, const ibv_ah_attr& path) {
  const SharedPort& port = process.segment().ports[device];
  if (path.is_global == 0) return port.ethernet == 0 && port.lid == path.dlid;
  return std::any_of(port.gids(), port.gids() + kGidTableLength, [&](const SharedGid& entry) {
    return entry.valid != 0 && std::memcmp(&entry.gid, &path.grh.dgid, sizeof(ibv_gid)) == 0;
  });
}

bool find_route(Qp& qp) {
  Requester& requester = qp.requester;
  Route& route = requester.route;
  if (route.process && route.qp->qpn.load(std::memory_order_acquire) == requester.dest_qpn) return true;
  route = {};
  const std::optional<QpPlace> place = qp.process->registry().find_qpn(requester.dest_qpn);
  if (!place) return false;
  std::shared_ptr<ProcessView> process = qp.process->find(*place);
  if (!process) return false;
  SharedQp& target = process->segment().qps[place->index];
  if (!is_addressed(*process, target.device, requester.path)) return false;
  route = {std::move(process), &target, place->index};
  return true;
}

Packets next_packets(const Qp& qp, const SendRequest& request) {
  const Requester& requester = qp.requester;
  Packets packets{};
  packets.opcode = static_cast<ibv_wr_opcode>(request.opcode);
  packets.source_qpn = qp.qp_num;
  packets.mtu_bytes = requester.mtu_bytes;
  packets.psn = (requester.psn + static_cast<std::uint32_t>(requester.offset / requester.mtu_bytes)) & k24Bits;
  packets.message_bytes = request.length;
  packets.offset = requester.offset;
  packets.bytes = std::min(request.length - requester.offset, kStepBytes);
  packets.count = static_cast<std::uint32_t>(
      std::max<std::uint64_t>((packets.bytes + requester.mtu_bytes - 1) / requester.mtu_bytes, 1));
  packets.remote_address = request.remote_address;
  packets.compare_add = request.compare_add;
  packets.swap = request.swap;
  packets.rkey = request.rkey;
  packets.imm = request.imm;
  packets.solicited = (request.flags & IBV_SEND_SOLICITED) != 0;
  return packets;
}

// Checks that need no peer: what the device itself refuses when it fetches the request.
ibv_wc_status check_request(const Qp& qp, const SendRequest& request) {
  if (request.length > qp.process->settings().max_msg_bytes) return IBV_WC_LOC_LEN_ERR;
  if (is_atomic(request.opcode) && request.length != sizeof(std::uint64_t)) return IBV_WC_LOC_LEN_ERR;
  const bool is_read = request.opcode == IBV_WR_RDMA_READ || is_atomic(request.opcode);
  if (is_read && qp.requester.max_rd_atomic == 0) return IBV_WC_LOC_QP_OP_ERR;
  return IBV_WC_SUCCESS;
}

bool takes_receive(const Packets& packets) {
  const bool is_send = packets.opcode == IBV_WR_SEND || packets.opcode == IBV_WR_SEND_WITH_IMM;
  return is_send ? packets.is_first() : packets.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && packets.is_last();
}

// Whether nothing passes between the two ports of the route.
bool is_cut_off(const Qp& qp, Faults* faults) {
  const Route& route = qp.requester.route;
  const Segment& peer = route.process->segment();
  if (peer.impaired.load(std::memory_order_relaxed) != 0 && !is_port_open(peer, route.qp->device, qp.shared->device)) {
    return true;
  }
  return faults != nullptr && faults->states().is_cut_off(qp, *route.process, route.qp->device);
}

// One step of the request at `executed`, from the send queue to the peer and its answer.
Attempt transmit(Qp& qp, const SendRequest& request, std::uint32_t slot) {
  if (const ibv_wc_status status = check_request(qp, request); status != IBV_WC_SUCCESS) return failed(status);
  const Packets packets = next_packets(qp, request);
  Spans local;
  if (!local_places(qp, slot, request, packets, local)) return failed(IBV_WC_LOC_PROT_ERR);
  Faults* const faults = softverbs::faults();
  if (faults != nullptr) {
    switch (faults->before_sending(qp)) {
      case Fate::kSent:
        break;
      case Fate::kLost:
        return {Outcome::kLost};
      case Fate::kLater:
        return {Outcome::kLater};
      case Fate::kFailed:
        return failed(faults->status(qp));
    }
  }
  if (!find_route(qp)) return {Outcome::kLost};
  const Route& route = qp.requester.route;
  ProcessView& process = *route.process;
  if (!process.is_own() && !process.is_alive(monotonic_ns())) {
    qp.requester.route = {};
    return {Outcome::kLost};
  }
  const Incarnation me = qp.process->me();
  if (!route.qp->lock.lock_within(me, kYieldsForPeerLock)) return {Outcome::kBusy};
  Answer answer = Answer::kSilence;
  if (route.qp->qpn.load(std::memory_order_relaxed) == qp.requester.dest_qpn && !is_cut_off(qp, faults)) {
    const bool refused = faults != nullptr && takes_receive(packets) && faults->refuses_receive(qp);
    answer = refused ? Answer::kReceiverNotReady : answer_packets(process, me, route.index, packets, local);
  }
  const std::uint32_t rnr_timer = route.qp->min_rnr_timer;
  route.qp->lock.unlock(me);
  if (faults != nullptr && faults->loses_answer(qp, answer == Answer::kAck && packets.is_last())) {
    return {Outcome::kLost};
  }
  switch (answer) {
    case Answer::kAck:
      return {packets.is_last() ? Outcome::kDone : Outcome::kProgress, IBV_WC_SUCCESS, 0, packets.count};
    case Answer::kSilence:
      return {Outcome::kLost};
    case Answer::kReceiverNotReady:
      return {Outcome::kNotReady, IBV_WC_SUCCESS, rnr_timer, 0};
    case Answer::kInvalidRequest:
      return failed(IBV_WC_REM_INV_REQ_ERR);
    case Answer::kAccessError:
      return failed(IBV_WC_REM_ACCESS_ERR);
    case Answer::kOperationalError:
      return failed(IBV_WC_REM_OP_ERR);
  }
  return failed(IBV_WC_GENERAL_ERR);
}

// Leaves the request at `executed` behind, with a completion if one is wanted. False when the queue is full.
bool complete(Qp& qp, const SendRequest& request, ibv_wc_status status) {
  const std::uint32_t position = qp.sends.executed.load(std::memory_order_relaxed);
  const bool wanted = qp.signal_all || (request.flags & IBV_SEND_SIGNALED) != 0 || status != IBV_WC_SUCCESS;
  bool pushed = true;
  if (wanted) {
    Cqe entry{};
    entry.wr_id = request.wr_id;
    entry.qp_index = qp.index;
    entry.position = position;
    entry.qpn = qp.qp_num;
    entry.status = static_cast<std::uint8_t>(status);
    entry.opcode = static_cast<std::uint8_t>(completion_opcode(request.opcode));
    entry.byte_len = static_cast<std::uint32_t>(request.length);
    if (Faults* faults = softverbs::faults(); faults != nullptr) entry.imm = faults->vendor_error(qp);
    pushed = push_completion(qp.process->view(), qp.process->me(), qp.shared->send_cq, entry, false);
  }
  qp.requester.offset = 0;
  qp.sends.executed.store(position + 1, std::memory_order_release);
  return pushed;
}

void restore_retries(Requester& requester) {
  requester.retries_left = requester.retry_count;
  requester.rnr_retries_left = requester.rnr_retry_count;
  requester.busy_since_ns = 0;
}

const SendRequest& current_request(const Qp& qp, std::uint32_t& slot) {
  slot = qp.sends.executed.load(std::memory_order_relaxed) & qp.sends.mask;
  return qp.sends.requests[slot];
}

void flush_sends(Qp& qp) {
  std::uint32_t slot = 0;
  while (is_request_waiting(qp)) complete(qp, current_request(qp, slot), IBV_WC_WR_FLUSH_ERR);
}

// Whoever reads the completion finds the QP in the error state, and the flushed requests behind it.
void fail_request(Qp& qp, const SendRequest& request, ibv_wc_status status) {
  const ProcessView& process = qp.process->view();
  const Incarnation me = qp.process->me();
  {
    SharedLockGuard lock(qp.shared->lock, me);
    const bool entered = enter_error_state(process, qp.index);
    complete(qp, request, status);
    finish_failure(process, me, qp.index, entered);
  }
  qp.requester.route = {};
  flush_sends(qp);
}

Step wait_until(Requester& requester, std::uint64_t due_ns) {
  requester.due_ns = due_ns;
  return Step::kWait;
}

Step on_lost(Requester& requester, std::uint64_t now) {
  if (requester.timeout == 0) return wait_until(requester, now + kNoTimeoutPollNs);
  requester.awaiting_timeout = true;
  return wait_until(requester, now + requester.timeout_ns());
}

// A lock that stays taken is a peer that was stopped in the middle: no answer, after the time that one may take.
Step on_busy(Requester& requester, std::uint64_t now) {
  if (requester.busy_since_ns == 0) requester.busy_since_ns = now;
  if (requester.timeout != 0 && now - requester.busy_since_ns > requester.timeout_ns()) {
    requester.busy_since_ns = 0;
    requester.awaiting_timeout = true;
    return wait_until(requester, now);
  }
  return wait_until(requester, now + kBusyPauseNs);
}

}  // namespace

void fail_own_qp(Qp& qp) {
  {
    SharedLockGuard lock(qp.shared->lock, qp.process->me());
    fail_qp(qp.process->view(), qp.process->me(), qp.index);
  }
  qp.requester.route = {};
  flush_sends(qp);
}

Step advance(Qp& qp, std::uint64_t& quantum) {
  Requester& requester = qp.requester;
  if (Faults* faults = softverbs::faults(); faults != nullptr && faults->states().is_frozen()) {
    return wait_until(requester, monotonic_ns() + kFrozenLookNs);
  }
  const ibv_qp_state state = qp.current_state();
  if (state == IBV_QPS_ERR) {
    fail_own_qp(qp);  // whoever brought it here may have died before the receives were flushed
    return Step::kIdle;
  }
  if (state == IBV_QPS_SQD && requester.offset == 0) {
    if (requester.drain_wanted) {
      requester.drain_wanted = false;
      raise_qp_event(qp.process->view(), qp.process->me(), qp.index, IBV_EVENT_SQ_DRAINED);
    }
    return Step::kIdle;
  }
  if ((state != IBV_QPS_RTS && state != IBV_QPS_SQD) || !is_request_waiting(qp)) return Step::kIdle;
  std::uint32_t slot = 0;
  const SendRequest& request = current_request(qp, slot);
  if (requester.due_ns != 0) {
    if (monotonic_ns() < requester.due_ns) return Step::kWait;
    requester.due_ns = 0;
  }
  if (requester.awaiting_timeout) {
    requester.awaiting_timeout = false;
    if (requester.retries_left == 0) {
      fail_request(qp, request, IBV_WC_RETRY_EXC_ERR);
      return Step::kIdle;
    }
    --requester.retries_left;
  }

  const std::uint64_t left = request.length - requester.offset;
  quantum -= std::min({quantum, left, kStepBytes});
  const Attempt result = transmit(qp, request, slot);
  switch (result.outcome) {
    case Outcome::kProgress:
      restore_retries(requester);
      requester.offset += kStepBytes;
      return Step::kMore;
    case Outcome::kDone: {
      restore_retries(requester);
      const std::uint64_t last_step_psn = requester.offset / requester.mtu_bytes;
      requester.psn = (requester.psn + static_cast<std::uint32_t>(last_step_psn) + result.packets) & k24Bits;
      if (!complete(qp, request, IBV_WC_SUCCESS)) {
        raise_qp_event(qp.process->view(), qp.process->me(), qp.index, IBV_EVENT_QP_FATAL);
        fail_own_qp(qp);
        return Step::kIdle;
      }
      return is_request_waiting(qp) ? Step::kMore : Step::kIdle;
    }
    case Outcome::kNotReady:
      if (requester.rnr_retry_count != kInfiniteRnrRetries) {
        if (requester.rnr_retries_left == 0) {
          fail_request(qp, request, IBV_WC_RNR_RETRY_EXC_ERR);
          return Step::kIdle;
        }
        --requester.rnr_retries_left;
      }
      return wait_until(requester, monotonic_ns() + kRnrTimers[result.rnr_timer % 32] * kRnrTimerUnitNs);
    case Outcome::kLost:
      return on_lost(requester, monotonic_ns());
    case Outcome::kBusy:
      return on_busy(requester, monotonic_ns());
    case Outcome::kLater:
      return Step::kWait;
    case Outcome::kFailed:
      fail_request(qp, request, result.status);
      return Step::kIdle;
  }
  return Step::kIdle;
}

}  // namespace verbatim::softverbs
