#include "softverbs/engine/requester.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/clock.h"
#include "softverbs/engine/attempt.h"
#include "softverbs/engine/completion_queue.h"
#include "softverbs/engine/copies_in_flight.h"
#include "softverbs/engine/datagrams.h"
#include "softverbs/engine/deferred_writes.h"
#include "softverbs/engine/late_writes.h"
#include "softverbs/engine/responder.h"
#include "softverbs/faults/faults.h"
#include "softverbs/host/with_memory.h"

namespace verbatim::softverbs {
namespace {

constexpr std::uint32_t kInfiniteRnrRetries = 7;
constexpr std::uint64_t kNoTimeoutPollNs = kNanosecondsPerMillisecond;  // timeout 0 retries forever, at this interval
constexpr std::uint64_t kBusyPauseNs = 50'000;
// How long a QP without acknowledgements waits for a lock that a stopped process holds, or for a thread that copies.
constexpr std::uint64_t kMaxBusyNs = 4 * kNanosecondsPerSecond;

// The RNR NAK timer field in units of 10 us (InfiniBand specification, volume 1, table 45).
constexpr std::array<std::uint32_t, 32> kRnrTimers{
    65536, 1,   2,   3,   4,    6,    8,    12,   16,   24,   32,   48,    64,    96,    128,   192,
    256,   384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
constexpr std::uint64_t kRnrTimerUnitNs = 10'000;

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

bool is_request_waiting(const Qp& qp) {
  return qp.requester.sent != qp.sends.posted.load(std::memory_order_acquire);
}

Packets next_packets(Qp& qp, const SendRequest& request) {
  const Requester& requester = qp.requester;
  Packets packets{};
  packets.opcode = static_cast<ibv_wr_opcode>(request.opcode);
  packets.source_qpn = qp.qp_num;
  packets.mtu_bytes = requester.mtu_bytes;
  packets.psn = (requester.psn + static_cast<std::uint32_t>(requester.offset / requester.mtu_bytes)) & k24Bits;
  packets.message_bytes = request.length;
  packets.offset = requester.offset;
  packets.bytes = std::min(request.length - requester.offset, requester.step_bytes);
  packets.count = static_cast<std::uint32_t>(
      std::max<std::uint64_t>((packets.bytes + requester.mtu_bytes - 1) / requester.mtu_bytes, 1));
  packets.remote_address = request.remote_address;
  packets.compare_add = request.compare_add;
  packets.swap = request.swap;
  packets.rkey = request.rkey;
  packets.imm = request.imm;
  packets.solicited = (request.flags & IBV_SEND_SOLICITED) != 0;
  packets.is_deferred = may_defer(qp, request, packets.offset + packets.bytes);
  packets.sender = may_begin_ahead(qp, request) ? &qp : nullptr;
  return packets;
}

// Checks that need no peer, which hardware makes when it fetches the request.
ibv_wc_status check_request(const Qp& qp, const SendRequest& request) {
  if (request.length > qp.process->settings().max_msg_bytes) return IBV_WC_LOC_LEN_ERR;
  if (is_atomic(request.opcode) && request.length != sizeof(std::uint64_t)) return IBV_WC_LOC_LEN_ERR;
  const bool is_read = request.opcode == IBV_WR_RDMA_READ || is_atomic(request.opcode);
  if (is_read && qp.requester.max_rd_atomic == 0) return IBV_WC_LOC_QP_OP_ERR;
  return IBV_WC_SUCCESS;
}

bool consumes_receive_entry(const Packets& packets) {
  const bool is_send = packets.opcode == IBV_WR_SEND || packets.opcode == IBV_WR_SEND_WITH_IMM;
  return is_send ? packets.is_first() : packets.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && packets.is_last();
}

// The request at `sent`, for Faults.
CurrentRequest current_request(Qp& qp) {
  Requester& requester = qp.requester;
  SendRequest& request = qp.sends.requests[requester.sent & qp.sends.mask];
  const bool is_last_posted = qp.sends.posted.load(std::memory_order_acquire) == requester.sent + 1;
  return {identity(qp),
          requester.faults,
          requester.sent,
          request.opcode,
          request.flags,
          is_last_posted,
          requester.timeout != 0 ? requester.timeout_ns() : 0};
}

// The vendor error that a fault gives to the request at `position`, 0: none.
std::uint32_t vendor_error(const Qp& qp, std::uint32_t position) {
  const QpFaults& faults = qp.requester.faults;
  return faults.is_evaluated && faults.position == position ? faults.message.vendor_error : 0;
}

// Decides about a step before it is sent. kDone: it may be sent. `local`: receives the sender's bytes.
Attempt check_step(Qp& qp, const SendRequest& request, const Packets& packets, Spans& local) {
  if (const ibv_wc_status status = check_request(qp, request); status != IBV_WC_SUCCESS) return failed(status);
  if (!gather_local(qp, qp.requester.sent & qp.sends.mask, request, packets, local)) return failed(IBV_WC_LOC_PROT_ERR);
  Faults* const faults = softverbs::faults();
  if (faults == nullptr) return {};
  switch (faults->decide_send(current_request(qp), qp.requester.due_ns)) {
    case SendDecision::kSent:
      return {};
    case SendDecision::kLost:
      return {Outcome::kLost};
    case SendDecision::kLater:
      return {Outcome::kLater};
    case SendDecision::kFailed:
      return failed(qp.requester.faults.message.status);
  }
  return {};
}

// Sends one step of a message without acknowledgement. kLost: the peer did not execute it.
Attempt transmit_unreliably(Qp& qp, const Packets& packets, Spans& local) {
  Faults* const faults = softverbs::faults();
  if (faults != nullptr && consumes_receive_entry(packets) && faults->refuses_receive(current_request(qp))) {
    return {Outcome::kLost};
  }
  if (qp.qp_type == IBV_QPT_UD) return transmit_datagram(qp, packets, local);
  if (const Outcome found = find_peer(qp); found != Outcome::kDone) return {found};
  const Route& route = qp.requester.route;
  const Incarnation me = qp.process->me();
  if (!route.qp->lock.lock_within(me, kYieldsForPeerLock)) return {Outcome::kBusy};
  Response response = Response::kNoResponse;
  if (route.qp->qpn.load(std::memory_order_relaxed) == qp.requester.dest_qpn && !is_unreachable(qp, faults)) {
    response = respond_unreliably(*route.process, me, route.index, packets, local);
  }
  route.qp->lock.unlock(me);
  if (response == Response::kSourceFault) return attempt_of(response);
  if (response != Response::kAck) return {Outcome::kLost};
  return {.outcome = packets.is_last() ? Outcome::kDone : Outcome::kProgress, .packets = packets.count};
}

// The outcome of a step for a QP without acknowledgements: a message that is lost ends there, as if it had been sent.
Attempt without_acknowledgement(const Requester& requester, const SendRequest& request, const Attempt& result) {
  const bool is_peer_stopped = result.outcome == Outcome::kBusy && requester.busy_since_ns != 0 &&
                               monotonic_ns() - requester.busy_since_ns > kMaxBusyNs;
  if (result.outcome != Outcome::kLost && !is_peer_stopped) return result;
  const std::uint64_t left = request.length - requester.offset;
  const std::uint64_t packets = (left + requester.mtu_bytes - 1) / requester.mtu_bytes;
  return {.outcome = Outcome::kDone, .packets = static_cast<std::uint32_t>(std::max<std::uint64_t>(packets, 1))};
}

// The answer to a READ or an atomic is visible at once: older writes to `local` that its device holds back must not
// follow it. False: not now.
bool show_before_answer(const Qp& qp, const Packets& packets, Spans& local) {
  Process& process = *qp.process;
  if (process.segment().has_late_writes == 0) return true;
  if (packets.opcode != IBV_WR_RDMA_READ && !is_atomic(static_cast<std::uint8_t>(packets.opcode))) return true;
  return std::all_of(local.items(), local.items() + local.count(), [&](const iovec& span) {
    const MemoryPath path = path_to(reinterpret_cast<std::uintptr_t>(span.iov_base));
    return show_late_writes(process.view(), process.me(), qp.shared->device, path) == CopyResult::kDone;
  });
}

// Sends one step of the request at `sent` and returns its outcome.
Attempt transmit(Qp& qp, const Packets& packets, Spans& local) {
  Faults* const faults = softverbs::faults();
  if (const Outcome found = find_peer(qp); found != Outcome::kDone) return {found};
  if (!show_before_answer(qp, packets, local)) return {Outcome::kBusy};
  const Route& route = qp.requester.route;
  const Incarnation me = qp.process->me();
  if (!route.qp->lock.lock_within(me, kYieldsForPeerLock)) return {Outcome::kBusy};
  Response response = Response::kNoResponse;
  const bool is_target = route.qp->qpn.load(std::memory_order_relaxed) == qp.requester.dest_qpn;
  if (is_target && !is_unreachable(qp, faults)) {
    const bool refused =
        faults != nullptr && consumes_receive_entry(packets) && faults->refuses_receive(current_request(qp));
    response = refused ? Response::kReceiverNotReady : respond(*route.process, me, route.index, packets, local);
  }
  if (is_target && response == Response::kNoResponse && !is_lost_before_target(qp, faults))
    note_unexecuted(*route.qp, packets);
  const bool is_acknowledged =
      response == Response::kAck || response == Response::kDuplicateAck || response == Response::kBegun;
  if (packets.is_deferred && is_acknowledged) {
    if (response == Response::kAck) defer_payload(qp, packets);
    qp.requester.deferred_psn = route.qp->expected_psn;
    place_some_deferred(qp);
  }
  Attempt result = attempt_of(response);
  result.rnr_timer = route.qp->min_rnr_timer;
  route.qp->lock.unlock(me);
  if (faults != nullptr && faults->drops_response(current_request(qp), is_acknowledged && packets.is_last())) {
    return {Outcome::kLost};
  }
  if (is_acknowledged) {
    result.packets = packets.count;
    if (!packets.is_last()) result.outcome = Outcome::kProgress;
  }
  return result;
}

// Ends the request at `executed`, with a completion if it is signaled or failed. False: the CQ is full.
bool complete(Qp& qp, ibv_wc_status status) {
  const std::uint32_t position = qp.sends.executed.load(std::memory_order_relaxed);
  const SendRequest& request = request_at(qp, position);
  const bool is_signaled =
      (qp.signal_all || (request.flags & IBV_SEND_SIGNALED) != 0) && (request.flags & kSuppressSuccess) == 0;
  const bool wanted = is_signaled || status != IBV_WC_SUCCESS;
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
    if (faults() != nullptr) entry.imm = vendor_error(qp, position);
    pushed = push_completion(qp.process->view(), qp.process->me(), qp.shared->send_cq, entry, false);
  }
  qp.sends.executed.store(position + 1, std::memory_order_release);
  return pushed;
}

// Completes the requests before `end`.
bool complete_until(Qp& qp, std::uint32_t end) {
  while (qp.sends.executed.load(std::memory_order_relaxed) != end) {
    if (!complete(qp, IBV_WC_SUCCESS)) return false;
  }
  return true;
}

void restore_retries(Requester& requester) {
  requester.retries_left = requester.retry_count;
  requester.rnr_retries_left = requester.rnr_retry_count;
  requester.busy_since_ns = 0;
}

void flush_sends(Qp& qp) {
  qp.deferred.clear();
  if (qp.copies) qp.copies->cancel();
  while (qp.sends.executed.load(std::memory_order_relaxed) != qp.sends.posted.load(std::memory_order_acquire)) {
    complete(qp, IBV_WC_WR_FLUSH_ERR);
  }
  qp.requester.sent = qp.sends.executed.load(std::memory_order_relaxed);
  qp.sends.sent.store(qp.requester.sent, std::memory_order_relaxed);
  qp.requester.offset = 0;
  qp.requester.unacknowledged_bytes = 0;
}

// Fails the request at `executed` of a QP that is not a reliable connection. Only its send queue stops; a program that
// reads the completion finds the QP in SQE, and the flushed requests after it.
Step stop_sends(Qp& qp, ibv_wc_status status) {
  {
    SharedLockGuard lock(qp.shared->lock, qp.process->me());
    if (qp.current_state() != IBV_QPS_ERR) qp.shared->state.store(IBV_QPS_SQE, std::memory_order_seq_cst);
    complete(qp, status);
  }
  flush_sends(qp);
  return Step::kIdle;
}

Step wait_until(Requester& requester, std::uint64_t due_ns) {
  requester.due_ns = due_ns;
  return Step::kWait;
}

// Fails the request at `executed`. A program that reads the completion finds the QP in the error state, and the flushed
// requests after it, unless they are late.
Step fail_request(Qp& qp, ibv_wc_status status) {
  if (qp.qp_type != IBV_QPT_RC) return stop_sends(qp, status);
  const ProcessView& process = qp.process->view();
  const Incarnation me = qp.process->me();
  const std::optional<RetryEvent> event =
      status == IBV_WC_RETRY_EXC_ERR ? qp.process->settings().retry_event : std::nullopt;
  {
    SharedLockGuard lock(qp.shared->lock, me);
    enter_error_state(process, qp.index);
    if (event && event->is_first) raise_qp_event(process, me, qp.index, event->type);
    complete(qp, status);
    if (event && !event->is_first) raise_qp_event(process, me, qp.index, event->type);
    flush_receives(process, me, qp.index);
  }
  qp.requester.route = {};
  if (qp.shared->flush_due_ns != 0) return wait_until(qp.requester, qp.shared->flush_due_ns);
  flush_sends(qp);
  return Step::kIdle;
}

Step on_lost(Requester& requester, std::uint64_t now) {
  if (requester.timeout == 0) return wait_until(requester, now + kNoTimeoutPollNs);
  requester.awaiting_timeout = true;
  return wait_until(requester, now + requester.timeout_ns());
}

// A lock that stays held belongs to a peer that was stopped. After the timeout this counts as no response.
Step on_busy(Requester& requester, std::uint64_t now) {
  if (requester.busy_since_ns == 0) requester.busy_since_ns = now;
  if (requester.timeout != 0 && now - requester.busy_since_ns > requester.timeout_ns()) {
    requester.busy_since_ns = 0;
    requester.awaiting_timeout = true;
    return wait_until(requester, now);
  }
  return wait_until(requester, now + kBusyPauseNs);
}

// Places and completes everything that was sent. Returns the step to take when that is not possible now.
std::optional<Step> finish_deferred(Qp& qp, bool may_have_failed) {
  std::uint32_t end = qp.requester.sent;
  const Attempt result = place_all_deferred(qp, may_have_failed, end);
  switch (result.outcome) {
    case Outcome::kBusy:
      return on_busy(qp.requester, monotonic_ns());
    case Outcome::kLost:
      return on_lost(qp.requester, monotonic_ns());
    default:
      break;
  }
  restore_retries(qp.requester);
  if (!complete_until(qp, end)) {
    fail_for_full_cq(qp);
    return Step::kIdle;
  }
  if (result.outcome == Outcome::kFailed) return fail_request(qp, result.status);
  return std::nullopt;
}

// Takes the step that an attempt without success demands.
Step on_failure(Qp& qp, const Attempt& result) {
  Requester& requester = qp.requester;
  switch (result.outcome) {
    case Outcome::kNotReady:
      if (requester.rnr_retry_count != kInfiniteRnrRetries) {
        if (requester.rnr_retries_left == 0) return fail_request(qp, IBV_WC_RNR_RETRY_EXC_ERR);
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
      return fail_request(qp, result.status);
    default:
      return Step::kIdle;
  }
}

// Finishes the WRITEs whose bytes are in memory, in their order. Returns the step to take when one cannot be finished
// now.
std::optional<Step> finish_copied(Qp& qp) {
  CopiesInFlight& in_flight = *qp.copies;
  while (!in_flight.empty()) {
    const GpuCopies::State state = in_flight.copies.oldest();
    if (state == GpuCopies::State::kRunning) return std::nullopt;
    const Packets packets = in_flight.steps.front();
    const Attempt result = finish_write(qp, packets, state);
    if (result.outcome != Outcome::kDone) return on_failure(qp, result);
    restore_retries(qp.requester);
    in_flight.remove_oldest();
    if (packets.is_last() && !complete(qp, IBV_WC_SUCCESS)) {
      fail_for_full_cq(qp);
      return Step::kIdle;
    }
  }
  return std::nullopt;
}

// A step ends at the end of the quantum, rounded up to a packet. A repeated step has the same end, because the
// responder recognizes a repetition by its last packet. Where each step draws random numbers, its length must not
// depend on which other QPs send now.
std::uint64_t step_bytes(const Qp& qp, std::uint64_t quantum) {
  if (qp.requester.unacknowledged_bytes != 0) return qp.requester.unacknowledged_bytes;
  if (qp.copies) return kStepBytes;  // its data is in GPU memory, and to begin a copy takes no longer for a long step
  const bool uses_random = faults() != nullptr || qp.deferred.is_enabled();
  if (uses_random && !qp.process->settings().has_rate()) return kStepBytes;
  return std::min(kStepBytes, round_up(quantum, qp.requester.mtu_bytes));
}

// Called before a request that must find all earlier payloads in memory. The payload of a WRITE with immediate may be
// placed with them: until the immediate arrives, its order is not defined either.
std::optional<Step> finish_deferred_before(Qp& qp, const Packets& packets) {
  const bool is_repeated = qp.requester.unacknowledged_bytes != 0;
  if (packets.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && !is_repeated && qp.deferred.random_bool())
    defer_payload(qp, packets);
  return finish_deferred(qp, false);
}

// What comes before the next request is sent: the state of the QP, timers, and requests that were sent but are not
// complete. nullopt: send the next request; else the step to take.
std::optional<Step> prepare_to_send(Qp& qp) {
  Requester& requester = qp.requester;
  if (Faults* faults = softverbs::faults(); faults != nullptr && faults->states().is_frozen()) {
    return wait_until(requester, monotonic_ns() + kFrozenPollNs);
  }
  const ibv_qp_state state = qp.current_state();
  if (state == IBV_QPS_ERR) {
    if (is_flush_late(*qp.shared)) return wait_until(requester, qp.shared->flush_due_ns);
    fail_own_qp(qp);  // the peer that moved the QP to this state may have died before it flushed the receives
    return Step::kIdle;
  }
  const bool drains = state == IBV_QPS_SQD && requester.offset == 0;
  const bool has_copies = is_copying(qp);
  if (drains && !has_deferred_work(qp) && !has_copies) {
    if (requester.drain_event_pending) {
      requester.drain_event_pending = false;
      raise_qp_event(qp.process->view(), qp.process->me(), qp.index, IBV_EVENT_SQ_DRAINED);
    }
    return Step::kIdle;
  }
  if (state != IBV_QPS_RTS && state != IBV_QPS_SQD) {
    if (state == IBV_QPS_SQE) flush_sends(qp);
    return Step::kIdle;
  }
  const bool has_request = !drains && is_request_waiting(qp);
  if (!has_request && !has_deferred_work(qp) && !has_copies) return Step::kIdle;
  if (requester.due_ns != 0) {
    if (monotonic_ns() < requester.due_ns) return Step::kWait;
    requester.due_ns = 0;
  }
  if (requester.awaiting_timeout) {
    requester.awaiting_timeout = false;
    if (requester.retries_left == 0) return fail_request(qp, IBV_WC_RETRY_EXC_ERR);
    --requester.retries_left;
  }
  if (has_copies) {
    if (const std::optional<Step> step = finish_copied(qp)) return *step;
    if (!has_request) return is_copying(qp) ? Step::kPoll : Step::kMore;
  }
  if (has_deferred_work(qp) && (drains || is_deferred_due(qp, has_request))) {
    if (const std::optional<Step> step = finish_deferred(qp, false)) return *step;
    return has_request || drains ? Step::kMore : Step::kIdle;
  }
  if (!has_request) return Step::kWaitDeferred;
  return std::nullopt;
}

// Sends one step of the next request.
Step send_step(Qp& qp, std::uint64_t& quantum) {
  Requester& requester = qp.requester;
  const SendRequest& request = request_at(qp, requester.sent);
  if (is_copying(qp) && !(may_begin_ahead(qp, request) && qp.copies->has_room())) return Step::kPoll;
  const std::uint64_t left = request.length - requester.offset;
  requester.step_bytes = step_bytes(qp, quantum);
  const std::uint64_t bytes = std::min(left, requester.step_bytes);
  const Packets packets = next_packets(qp, request);
  Spans local;
  Attempt result = check_step(qp, request, packets, local);
  if (result.outcome == Outcome::kDone) {
    if (has_deferred_work(qp) && !packets.is_deferred) {
      if (const std::optional<Step> step = finish_deferred_before(qp, packets)) return *step;
    }
    quantum -= std::min(quantum, bytes);
    result = qp.qp_type == IBV_QPT_RC ? transmit(qp, packets, local) : transmit_unreliably(qp, packets, local);
  }
  if (qp.qp_type != IBV_QPT_RC) {
    result = without_acknowledgement(requester, request, result);
    // The clock's record of a grant names one destination.
    if (qp.qp_type == IBV_QPT_UD && qp.process->settings().has_rate()) quantum = 0;
  }
  const bool is_sent = result.outcome == Outcome::kProgress || result.outcome == Outcome::kDone;
  if (!is_sent && is_copying(qp)) return Step::kPoll;  // the earlier requests must be finished first
  if (result.outcome == Outcome::kLost) requester.unacknowledged_bytes = bytes;
  if (has_deferred_work(qp) && !is_sent) {
    if (const std::optional<Step> step = finish_deferred(qp, true)) return *step;
  }
  switch (result.outcome) {
    case Outcome::kProgress:
      restore_retries(requester);
      requester.unacknowledged_bytes = 0;
      requester.bytes_sent += bytes;
      requester.offset += bytes;
      return Step::kMore;
    case Outcome::kDone: {
      restore_retries(requester);
      requester.unacknowledged_bytes = 0;
      const std::uint64_t last_step_psn = requester.offset / requester.mtu_bytes;
      requester.psn = (requester.psn + static_cast<std::uint32_t>(last_step_psn) + result.packets) & k24Bits;
      requester.bytes_sent += bytes;
      requester.offset = 0;
      qp.sends.sent.store(++requester.sent, std::memory_order_relaxed);
      if (!result.is_begun && (!qp.deferred.is_enabled() || request.opcode != IBV_WR_RDMA_WRITE)) {
        if (!complete(qp, IBV_WC_SUCCESS)) {
          fail_for_full_cq(qp);
          return Step::kIdle;
        }
      }
      if (is_request_waiting(qp) || result.is_begun) return Step::kMore;
      if (!has_deferred_work(qp)) return Step::kIdle;
      return may_program_sleep(qp) ? Step::kMore : Step::kWaitDeferred;
    }
    default:
      return on_failure(qp, result);
  }
  return Step::kIdle;
}

// What finds no memory has sent nothing: it counts as lost.
Step advance_requests(Qp& qp, std::uint64_t& quantum) {
  std::optional<Step> step;
  const bool is_taken = with_memory([&] {
    step = prepare_to_send(qp);
    if (!step) step = send_step(qp, quantum);
  });
  return is_taken ? *step : on_lost(qp.requester, monotonic_ns());
}

}  // namespace

void fail_for_full_cq(Qp& qp) {
  raise_qp_event(qp.process->view(), qp.process->me(), qp.index, IBV_EVENT_QP_FATAL);
  fail_own_qp(qp);
}

void fail_own_qp(Qp& qp) {
  {
    SharedLockGuard lock(qp.shared->lock, qp.process->me());
    fail_qp(qp.process->view(), qp.process->me(), qp.index);
  }
  qp.requester.route = {};
  if (!is_flush_late(*qp.shared)) flush_sends(qp);
}

Step advance(Qp& qp, std::uint64_t& quantum) {
  if (!qp.copies) return advance_requests(qp, quantum);
  qp.copies->copies.advance();
  const Step step = advance_requests(qp, quantum);
  // A copy that is under way must end whatever the QP waits for: the owner of the memory may wait for its end.
  return step == Step::kWait && !qp.copies->copies.has_settled() ? Step::kPoll : step;
}

}  // namespace verbatim::softverbs
