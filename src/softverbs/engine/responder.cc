#include "softverbs/engine/responder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <list>
#include <thread>

#include "base/clock.h"
#include "softverbs/engine/completion_queue.h"
#include "softverbs/engine/copies_in_flight.h"
#include "softverbs/engine/events.h"
#include "softverbs/engine/late_writes.h"
#include "softverbs/engine/memory_region.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/receive_queue.h"
#include "softverbs/host/with_memory.h"
#include "softverbs/memory/gpu_copies.h"

namespace verbatim::softverbs {
namespace {

constexpr std::uint64_t kAtomicBytes = 8;
// From reading the word to writing it, where atomics of other devices are not excluded.
constexpr std::chrono::microseconds kTimeOfAtomic{50};
constexpr std::uint64_t kGrhBytes = sizeof(ibv_grh);
static_assert(kGrhBytes == 40);

// A WRITE of at most so many bytes between host memories does not wait for copies of GPU memory, but follows them.
constexpr std::uint64_t kShortBytes = 4096;

bool is_send(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
}

bool carries_imm(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

// An error that belongs to no receive request is reported by an event.
void fail_with_event(const ProcessView& process, Incarnation me, std::uint32_t qp_index, ibv_event_type event) {
  enter_error_state(process, qp_index);
  raise_qp_event(process, me, qp_index, event);
  flush_receives(process, me, qp_index);
}

// Executes one step of a message for one QP. Lives for one call.
class Responder {
 public:
  Responder(const ProcessView& process, Incarnation me, std::uint32_t index, const Packets& packets, Spans& local)
      : process_(process),
        segment_(process.segment()),
        me_(me),
        index_(index),
        qp_(segment_.qps[index]),
        packets_(packets),
        local_(local) {}

  Response response() {
    if (!receives()) return Response::kNoResponse;
    if (!is_expected(qp_, packets_.source_qpn, packets_.psn)) {
      return is_duplicate() ? respond_to_duplicate() : Response::kNoResponse;
    }
    note_established();
    const Response response = is_well_formed() ? execute() : refuse(Response::kInvalidRequest);
    if (response == Response::kAck || response == Response::kBegun)
      qp_.expected_psn = (qp_.expected_psn + packets_.count) & k24Bits;
    return response;
  }

  // The next message begins with its first packet, whatever was lost before.
  Response unreliable_response() {
    if (!receives()) return Response::kNoResponse;
    if (packets_.is_first() || qp_.expected_psn != packets_.psn) abandon_message();
    if (!packets_.is_first() && qp_.expected_psn != packets_.psn) return Response::kNoResponse;
    note_established();
    if (!is_well_formed()) return Response::kNoResponse;
    const Response response = is_send(packets_.opcode) ? execute_unreliable_send() : execute_unreliable_write();
    if (response == Response::kAck) qp_.expected_psn = (packets_.psn + packets_.count) & k24Bits;
    return response;
  }

  Response datagram_response(const DatagramHeader& header) {
    if (!is_ready() || header.qkey != qp_.qkey.load(std::memory_order_relaxed)) return Response::kNoResponse;
    if (!take_receive()) return Response::kReceiverNotReady;
    if (is_to_fail()) return fail_receive_by_fault();
    if (capacity() < kGrhBytes + packets_.message_bytes) {
      abandon_message();
      return Response::kInvalidRequest;
    }
    if (header.has_grh) {
      Spans grh;
      grh.add(reinterpret_cast<std::uintptr_t>(&header.grh), kGrhBytes);
      if (const Response placed = place_in_receive(0, grh); placed != Response::kAck) return placed;
    }
    if (const Response placed = place_in_receive(kGrhBytes, local_); placed != Response::kAck) return placed;
    Cqe entry = received_entry(IBV_WC_RECV);
    entry.byte_len += static_cast<std::uint32_t>(kGrhBytes);
    entry.source_qpn = packets_.source_qpn;
    entry.slid = header.slid;
    entry.sl = header.sl;
    if (header.has_grh) entry.wc_flags |= IBV_WC_GRH;
    return finish_receive(entry);
  }

  Response finish_copied_write(bool is_copied) {
    // The QP may have been connected again since the copy began.
    if (!receives() || qp_.resets != packets_.target_resets) return Response::kNoResponse;
    if (!is_copied) return refuse_now(Response::kOperationalError);
    if (!take_receive()) return Response::kReceiverNotReady;
    return is_to_fail() ? fail_receive_by_fault() : finish_receive(received_entry(IBV_WC_RECV_RDMA_WITH_IMM));
  }

  Response place_payload() {
    if ((qp_.access & IBV_ACCESS_REMOTE_WRITE) == 0) return Response::kInvalidRequest;
    Spans spans;
    if (!find_remote_spans(IBV_ACCESS_REMOTE_WRITE, spans)) return Response::kAccessError;
    switch (write(local_, spans)) {
      case CopyResult::kDone:
        return Response::kAck;
      case CopyResult::kProcessDead:
        return Response::kNoResponse;
      case CopyResult::kSourceFault:
        return Response::kSourceFault;
      default:
        return Response::kOperationalError;
    }
  }

 private:
  bool is_ready() const {
    const auto state = static_cast<ibv_qp_state>(qp_.state.load(std::memory_order_relaxed));
    return state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD || state == IBV_QPS_SQE;
  }

  bool receives() const { return is_ready() && qp_.dest_qpn == packets_.source_qpn; }

  void note_established() {
    if (qp_.established != 0) return;
    qp_.established = 1;
    if (qp_.state.load(std::memory_order_relaxed) == IBV_QPS_RTR)
      raise_qp_event(process_, me_, index_, IBV_EVENT_COMM_EST);
  }

  bool is_sender_copying() const { return packets_.sender != nullptr && is_copying(*packets_.sender); }

  // A repetition of the step that was executed last, because its response was lost. A requester waits for the response
  // before it sends the next step, so no older step is repeated.
  bool is_duplicate() const {
    return qp_.established != 0 && ((packets_.psn + packets_.count) & k24Bits) == qp_.expected_psn;
  }

  // A SEND or WRITE is acknowledged again but not executed again, because the program may use the memory for something
  // else now. A READ is executed again. An atomic returns the value that it found the first time.
  Response respond_to_duplicate() {
    switch (packets_.opcode) {
      case IBV_WR_RDMA_READ:
        return execute_read();
      case IBV_WR_ATOMIC_CMP_AND_SWP:
      case IBV_WR_ATOMIC_FETCH_AND_ADD:
        if (qp_.atomic_psn != packets_.psn) return Response::kNoResponse;
        return return_word(qp_.atomic_result);
      default:
        return Response::kDuplicateAck;
    }
  }

  // All packets except the last one have the size of the path MTU, so both ends must have the same path MTU.
  bool is_well_formed() const {
    return packets_.mtu_bytes == qp_.path_mtu_bytes ||
           packets_.message_bytes <= std::min(packets_.mtu_bytes, qp_.path_mtu_bytes);
  }

  Response execute() {
    switch (packets_.opcode) {
      case IBV_WR_SEND:
      case IBV_WR_SEND_WITH_IMM:
        return execute_send();
      case IBV_WR_RDMA_WRITE:
      case IBV_WR_RDMA_WRITE_WITH_IMM:
        return execute_write();
      case IBV_WR_RDMA_READ:
        return execute_read();
      case IBV_WR_ATOMIC_CMP_AND_SWP:
      case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return execute_atomic();
      default:
        return refuse(Response::kInvalidRequest);
    }
  }

  Response execute_send() {
    if (lacks_completion()) return finish_receive(received_entry(IBV_WC_RECV));
    const bool is_begun = qp_.open.active != 0 && qp_.open.filled != 0;
    if (packets_.is_first() == is_begun) return refuse(Response::kInvalidRequest);
    if (packets_.is_first()) {
      // A first step that could not be copied has left its receive open.
      if (qp_.open.active == 0 && !consume()) return Response::kReceiverNotReady;
      if (is_to_fail()) return fail_receive_by_fault();
      if (capacity() < packets_.message_bytes) return fail_receive(IBV_WC_LOC_LEN_ERR, Response::kInvalidRequest);
    }
    return fill_receive();
  }

  Response execute_unreliable_send() {
    if (packets_.is_first()) {
      if (!take_receive()) return Response::kReceiverNotReady;
      if (is_to_fail()) return fail_receive_by_fault();
      if (capacity() < packets_.message_bytes) {
        abandon_message();
        return Response::kInvalidRequest;
      }
    } else if (qp_.open.active == 0) {
      return Response::kNoResponse;
    }
    return fill_receive();
  }

  // Bytes of the open receive.
  std::uint64_t capacity() const {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < qp_.open.entry.sge_count; ++i) bytes += qp_.open.sges[i].length;
    return bytes;
  }

  // Places this step of a SEND in the open receive.
  Response fill_receive() {
    if (const Response placed = place_in_receive(packets_.offset, local_); placed != Response::kAck) return placed;
    qp_.open.filled = 1;
    return packets_.is_last() ? finish_receive(received_entry(IBV_WC_RECV)) : Response::kAck;
  }

  // Writes all of `from` to the open receive, from byte `offset` on.
  Response place_in_receive(std::uint64_t offset, Spans& from) {
    Spans spans;
    if (!find_receive_spans(offset, from.total(), spans)) {
      return fail_receive(IBV_WC_LOC_PROT_ERR, Response::kOperationalError);
    }
    const CopyResult copied = write(from, spans);
    if (copied == CopyResult::kDone) return Response::kAck;
    if (copied == CopyResult::kSourceFault) return Response::kSourceFault;
    // One sender that may not access this memory must not end a QP that others send to.
    const bool is_dropped =
        copied == CopyResult::kProcessDead || (copied == CopyResult::kForbidden && qp_.type != IBV_QPT_RC);
    return is_dropped ? Response::kNoResponse : fail_receive(IBV_WC_LOC_PROT_ERR, Response::kOperationalError);
  }

  Response execute_write() {
    const bool consumes = packets_.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && packets_.is_last();
    if ((qp_.access & IBV_ACCESS_REMOTE_WRITE) == 0) return refuse(Response::kInvalidRequest);
    const std::uint32_t earlier = is_sender_copying() ? packets_.sender->copies->receives_consumed : 0;
    if (consumes && !has_receive_after(earlier))
      return earlier != 0 ? Response::kAfterCopies : Response::kReceiverNotReady;
    Spans spans;
    if (!find_remote_spans(IBV_ACCESS_REMOTE_WRITE, spans)) return refuse(Response::kAccessError);
    if (packets_.is_deferred) return Response::kAck;
    const bool has_gpu_memory = local_.has_gpu_memory() || spans.has_gpu_memory();
    const bool is_short = packets_.bytes <= kShortBytes;  // such as an immediate alone behind its data
    const bool may_begin = packets_.sender != nullptr && !is_written_late(spans);
    if (may_begin && (has_gpu_memory || (is_sender_copying() && is_short))) {
      return begin_copy(spans, consumes);
    }
    if (is_sender_copying()) return Response::kAfterCopies;
    if (!consumes || !lacks_completion()) {
      if (const Response moved = moved_or_refused(write(local_, spans)); moved != Response::kAck) return moved;
    }
    if (!consumes) return Response::kAck;
    if (!take_receive()) return Response::kReceiverNotReady;
    return is_to_fail() ? fail_receive_by_fault() : finish_receive(received_entry(IBV_WC_RECV_RDMA_WITH_IMM));
  }

  Response execute_unreliable_write() {
    const bool consumes = packets_.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && packets_.is_last();
    if ((qp_.access & IBV_ACCESS_REMOTE_WRITE) == 0) return Response::kInvalidRequest;
    if (consumes && !has_receive_after(0)) return Response::kReceiverNotReady;
    Spans spans;
    if (!find_remote_spans(IBV_ACCESS_REMOTE_WRITE, spans)) return Response::kAccessError;
    const CopyResult copied = write(local_, spans);
    if (copied == CopyResult::kSourceFault) return Response::kSourceFault;
    if (copied != CopyResult::kDone) return Response::kOperationalError;
    if (!consumes) return Response::kAck;
    if (!take_receive()) return Response::kReceiverNotReady;
    return is_to_fail() ? fail_receive_by_fault() : finish_receive(received_entry(IBV_WC_RECV_RDMA_WITH_IMM));
  }

  Response begin_copy(Spans& spans, bool consumes) {
    const bool is_begun = with_memory([&] {
      CopiesInFlight& in_flight = copies_of(*packets_.sender);
      std::list<Packets> step{packets_};
      step.front().target_resets = qp_.resets;
      in_flight.copies.begin(process_, CopyDirection::kToTarget, local_, spans, &packets_.sender->shared->sends,
                             &qp_.arrivals);
      in_flight.steps.splice(in_flight.steps.end(), step);
      if (consumes) ++in_flight.receives_consumed;
    });
    return is_begun ? Response::kBegun : Response::kNoResponse;
  }

  Response execute_read() {
    if ((qp_.access & IBV_ACCESS_REMOTE_READ) == 0 || qp_.max_dest_rd_atomic == 0) {
      return refuse(Response::kInvalidRequest);
    }
    Spans spans;
    if (!find_remote_spans(IBV_ACCESS_REMOTE_READ, spans)) return refuse(Response::kAccessError);
    if (packets_.bytes != 0) {
      const Response shown =
          moved_or_refused(show_late(path_to(reinterpret_cast<std::uintptr_t>(spans.items()->iov_base))));
      if (shown != Response::kAck) return shown;
    }
    return moved_or_refused(copy_from(process_, local_, spans));
  }

  Response execute_atomic() {
    if ((qp_.access & IBV_ACCESS_REMOTE_ATOMIC) == 0 || qp_.max_dest_rd_atomic == 0 ||
        packets_.remote_address % kAtomicBytes != 0) {
      return refuse(Response::kInvalidRequest);
    }
    const Region region{KeyKind::kRemote, packets_.rkey, qp_.pd, IBV_ACCESS_REMOTE_ATOMIC};
    const std::uint64_t address = translate(segment_, region, packets_.remote_address, kAtomicBytes);
    if (address == 0) return refuse(Response::kAccessError);
    if (is_gpu_address(address) && segment_.ports[qp_.device].refuses_gpu_atomics != 0)
      return refuse(Response::kOperationalError);
    CopyResult shown = show_late(MemoryPath::kHost);
    if (shown == CopyResult::kDone && is_gpu_address(address)) shown = show_late(path_to(address));
    if (shown != CopyResult::kDone) return moved_or_refused(shown);
    const bool excludes_own = segment_.ports[qp_.device].excludes_own_atomics != 0;
    // Several processes may reach one address of a GPU.
    AtomicsLocks& locks =
        is_gpu_address(address) ? process_.registry().gpu_staging().atomics_locks : segment_.atomics_locks;
    SharedLockGuard lock(locks[excludes_own ? qp_.device : 0], me_);
    std::uint64_t before = 0;
    if (const Response moved = move_word(copy_from, before, address); moved != Response::kAck) return moved;
    if (excludes_own) std::this_thread::sleep_for(kTimeOfAtomic);  // so that another device writes in between
    std::uint64_t after = before;
    if (packets_.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      after = before + packets_.compare_add;
    } else if (before == packets_.compare_add) {
      after = packets_.swap;
    }
    if (after != before) {
      if (const Response moved = move_word(copy_to, after, address); moved != Response::kAck) return once(moved);
    }
    qp_.atomic_psn = packets_.psn;
    qp_.atomic_result = before;
    return once(return_word(before));
  }

  // A word that may have been changed must not be changed again: a requester repeats what got no response.
  Response once(Response response) {
    const bool may_repeat = response == Response::kNoResponse && process_.is_alive(monotonic_ns());
    return may_repeat ? refuse(Response::kOperationalError) : response;
  }

  Response return_word(std::uint64_t word) {
    if (local_.has_gpu_memory()) {
      Spans from;
      from.add(reinterpret_cast<std::uintptr_t>(&word), sizeof word);
      // This process is the requester: both ends are its own.
      return moved_or_refused(copy_gpu_memory(Process::joined()->view(), CopyDirection::kToTarget, from, local_));
    }
    const auto* bytes = reinterpret_cast<const std::byte*>(&word);
    for (const iovec* span = local_.items(); span != local_.items() + local_.count(); ++span) {
      std::memcpy(span->iov_base, bytes, span->iov_len);
      bytes += span->iov_len;
    }
    return Response::kAck;
  }

  Response move_word(CopyResult (*copy)(const ProcessView&, Spans&, Spans&), std::uint64_t& word,
                     std::uint64_t address) {
    Spans local;
    local.add(reinterpret_cast<std::uintptr_t>(&word), sizeof word);
    Spans remote;
    remote.add(address, sizeof word);
    return moved_or_refused(copy(process_, local, remote));
  }

  // Writes all of `from` to memory of the process.
  CopyResult write(Spans& from, Spans& to) {
    return is_written_late(to) ? write_late(process_, me_, qp_.device, from, to) : copy_to(process_, from, to);
  }

  bool is_written_late(Spans& to) const {
    if (segment_.has_late_writes == 0) return false;
    return std::any_of(to.items(), to.items() + to.count(), [&](const iovec& span) {
      const auto address = reinterpret_cast<std::uintptr_t>(span.iov_base);
      return late_queue(segment_, qp_.device, path_to(address)) != nullptr;
    });
  }

  // Makes visible what this device has written before on one path.
  CopyResult show_late(MemoryPath path) {
    if (segment_.has_late_writes == 0) return CopyResult::kDone;
    return show_late_writes(process_, me_, qp_.device, path);
  }

  Response moved_or_refused(CopyResult result) {
    if (result == CopyResult::kDone) return Response::kAck;
    if (result == CopyResult::kProcessDead) return Response::kNoResponse;
    if (result == CopyResult::kSourceFault) return Response::kSourceFault;
    return refuse(Response::kOperationalError);
  }

  // The key of an empty message is not checked, because the message accesses no memory (C9-88).
  bool find_remote_spans(std::uint32_t access, Spans& spans) const {
    if (packets_.message_bytes == 0) return true;
    const Region region{KeyKind::kRemote, packets_.rkey, qp_.pd, access};
    const std::uint64_t begin = translate(segment_, region, packets_.remote_address, packets_.message_bytes);
    if (begin == 0) return false;
    spans.add(begin + packets_.offset, packets_.bytes);
    spans.set_gpu_memory(gpu_memory_of(segment_, packets_.rkey));
    return true;
  }

  // The part of the open receive's buffers from byte `skip` on.
  bool find_receive_spans(std::uint64_t skip, std::uint64_t left, Spans& spans) const {
    const std::uint32_t pd = qp_.srq == kNoIndex ? qp_.pd : segment_.srqs[qp_.srq].pd;
    for (std::uint32_t i = 0; i < qp_.open.entry.sge_count && left > 0; ++i) {
      const SharedSge& sge = qp_.open.sges[i];
      if (skip >= sge.length) {
        skip -= sge.length;
        continue;
      }
      const std::uint64_t bytes = std::min<std::uint64_t>(sge.length - skip, left);
      const Region region{KeyKind::kLocal, sge.lkey, pd, IBV_ACCESS_LOCAL_WRITE};
      const std::uint64_t begin = translate(segment_, region, sge.address + skip, bytes);
      if (begin == 0) return false;
      spans.add(begin, bytes);
      skip = 0;
      left -= bytes;
    }
    return true;
  }

  // Whether a receive is open or posted besides those that `earlier` requests will consume.
  bool has_receive_after(std::uint32_t earlier) const {
    const ReceiveRing& ring = qp_.srq == kNoIndex ? qp_.receives : segment_.srqs[qp_.srq].ring;
    return waiting_receives(ring) + (qp_.open.active != 0 ? 1U : 0U) > earlier;
  }

  bool consume() {
    if (qp_.srq == kNoIndex) return consume_receive(segment_, qp_.receives, qp_.open);
    SharedSrq& srq = segment_.srqs[qp_.srq];
    SharedLockGuard lock(srq.lock, me_);
    if (!consume_receive(segment_, srq.ring, qp_.open)) return false;
    if (srq.limit != 0 && waiting_receives(srq.ring) < srq.limit) {
      srq.limit = 0;
      raise_event(process_, me_, srq.context, {IBV_EVENT_SRQ_LIMIT_REACHED, EventTarget::kSrq, qp_.srq, srq.serial});
    }
    return true;
  }

  // The message was sent before, and its bytes are written.
  bool lacks_completion() const { return qp_.open.active != 0 && qp_.open.filled == kWholeMessage; }

  // Opens a receive, or takes the open one: an abandoned message has left it, or this message has opened it before.
  bool take_receive() { return qp_.open.active != 0 || consume(); }

  // Ends a message whose rest was lost, or that is too long. The next message uses its receive. A receive of a shared
  // queue is not for this QP alone and completes instead.
  void abandon_message() {
    if (qp_.open.active == 0) return;
    qp_.open.filled = 0;
    if (qp_.srq == kNoIndex) return;
    push_completion(process_, me_, qp_.recv_cq, receive_entry(IBV_WC_REM_INV_REQ_ERR, IBV_WC_RECV), true);
    qp_.open.active = 0;
  }

  Cqe received_entry(ibv_wc_opcode opcode) const {
    Cqe entry = receive_entry(IBV_WC_SUCCESS, opcode);
    entry.byte_len = static_cast<std::uint32_t>(packets_.message_bytes);
    if (carries_imm(packets_.opcode)) {
      entry.imm = packets_.imm;
      entry.wc_flags = IBV_WC_WITH_IMM;
    }
    return entry;
  }

  Response finish_receive(const Cqe& entry) {
    // The completion is a write behind what the device has written to host memory. If that cannot be visible now, the
    // sender repeats the message, for which the receive stays open.
    if (show_late(MemoryPath::kHost) != CopyResult::kDone) {
      qp_.open.filled = kWholeMessage;
      return Response::kNoResponse;
    }
    // In this order: if this process dies in between, the owner flushes the receive too. It must not be lost.
    const bool pushed = qp_.open.entry.fault == kWithoutCompletion ||
                        push_completion(process_, me_, qp_.recv_cq, entry, packets_.solicited);
    qp_.open.active = 0;
    return pushed ? Response::kAck : fail_with_event(IBV_EVENT_QP_FATAL, Response::kOperationalError);
  }

  // An error that belongs to a receive request is reported by its completion.
  Response fail_receive(ibv_wc_status status, Response response) {
    enter_error_state(process_, index_);
    push_completion(process_, me_, qp_.recv_cq, receive_entry(status, IBV_WC_RECV), true);
    qp_.open.active = 0;
    flush_receives(process_, me_, index_);
    return response;
  }

  bool is_to_fail() const { return qp_.open.entry.fault != 0 && qp_.open.entry.fault != kWithoutCompletion; }

  Response fail_receive_by_fault() {
    const auto status = static_cast<ibv_wc_status>(qp_.open.entry.fault);
    return fail_receive(status, status == IBV_WC_LOC_LEN_ERR ? Response::kInvalidRequest : Response::kOperationalError);
  }

  Response refuse(Response response) {
    // The QP must not fail before the earlier requests have been finished.
    return is_sender_copying() ? Response::kAfterCopies : refuse_now(response);
  }

  Response refuse_now(Response response) {
    refuse_request(process_, me_, index_, response);
    return response;
  }

  Response fail_with_event(ibv_event_type event, Response response) {
    softverbs::fail_with_event(process_, me_, index_, event);
    return response;
  }

  Cqe receive_entry(ibv_wc_status status, ibv_wc_opcode opcode) const {
    Cqe entry{};
    entry.wr_id = qp_.open.entry.wr_id;
    entry.qp_index = index_;
    entry.position = qp_.open.entry.position;
    entry.qpn = qp_.qpn.load(std::memory_order_relaxed);
    entry.source_qpn = qp_.dest_qpn;
    entry.status = static_cast<std::uint8_t>(status);
    entry.opcode = static_cast<std::uint8_t>(opcode);
    return entry;
  }

  const ProcessView& process_;
  Segment& segment_;
  const Incarnation me_;
  const std::uint32_t index_;
  SharedQp& qp_;
  const Packets& packets_;
  Spans& local_;
};

}  // namespace

Response respond(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                 Spans& local) {
  return Responder(process, me, qp_index, packets, local).response();
}

Response respond_unreliably(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                            Spans& local) {
  return Responder(process, me, qp_index, packets, local).unreliable_response();
}

Response receive_datagram(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                          const DatagramHeader& header, Spans& local) {
  return Responder(process, me, qp_index, packets, local).datagram_response(header);
}

bool is_expected(const SharedQp& qp, std::uint32_t source_qpn, std::uint32_t psn) {
  return qp.dest_qpn == source_qpn && qp.expected_psn == psn;
}

void note_unexecuted(SharedQp& qp, const Packets& packets) {
  if (!is_expected(qp, packets.source_qpn, packets.psn)) return;
  qp.unexecuted_psn = packets.psn;
  qp.unexecuted_packets = packets.count;
}

Response place_payload(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                       Spans& local) {
  return Responder(process, me, qp_index, packets, local).place_payload();
}

Response finish_copied_write(const ProcessView& process, Incarnation me, std::uint32_t qp_index, const Packets& packets,
                             bool is_copied) {
  Spans none;
  return Responder(process, me, qp_index, packets, none).finish_copied_write(is_copied);
}

void refuse_request(const ProcessView& process, Incarnation me, std::uint32_t qp_index, Response response) {
  fail_with_event(process, me, qp_index,
                  response == Response::kAccessError        ? IBV_EVENT_QP_ACCESS_ERR
                  : response == Response::kOperationalError ? IBV_EVENT_QP_FATAL
                                                            : IBV_EVENT_QP_REQ_ERR);
}

void fail_qp(const ProcessView& process, Incarnation me, std::uint32_t qp_index) {
  enter_error_state(process, qp_index);
  flush_receives(process, me, qp_index);
}

void enter_error_state(const ProcessView& process, std::uint32_t qp_index) {
  SharedQp& qp = process.segment().qps[qp_index];
  if (qp.state.load(std::memory_order_relaxed) == IBV_QPS_ERR) return;
  const std::uint32_t delay_ns = process.segment().ports[qp.device].flush_delay_ns;
  qp.flush_due_ns = delay_ns == 0 ? 0 : monotonic_ns() + delay_ns;
  qp.is_last_receive_due = qp.srq != kNoIndex ? 1 : 0;
  qp.state.store(IBV_QPS_ERR, std::memory_order_seq_cst);
  request_service(process, qp_index);
}

bool is_flush_late(const SharedQp& qp) {
  return qp.flush_due_ns != 0 && monotonic_ns() < qp.flush_due_ns;
}

void flush_receives(const ProcessView& process, Incarnation me, std::uint32_t qp_index) {
  SharedQp& qp = process.segment().qps[qp_index];
  if (is_flush_late(qp)) return;
  Cqe entry{};
  entry.qp_index = qp_index;
  entry.qpn = qp.qpn.load(std::memory_order_relaxed);
  entry.status = IBV_WC_WR_FLUSH_ERR;
  entry.opcode = IBV_WC_RECV;
  // Receives of a shared queue stay there, except one that this QP has consumed and not completed.
  while (qp.open.active != 0 || (qp.srq == kNoIndex && consume_receive(process.segment(), qp.receives, qp.open))) {
    entry.wr_id = qp.open.entry.wr_id;
    entry.position = qp.open.entry.position;
    push_completion(process, me, qp.recv_cq, entry, true);
    qp.open.active = 0;
  }
  if (qp.is_last_receive_due == 0) return;
  raise_qp_event(process, me, qp_index, IBV_EVENT_QP_LAST_WQE_REACHED);
  qp.is_last_receive_due = 0;
}

void raise_qp_event(const ProcessView& process, Incarnation me, std::uint32_t qp_index, ibv_event_type type) {
  const SharedQp& qp = process.segment().qps[qp_index];
  raise_event(process, me, qp.context,
              {static_cast<std::uint32_t>(type), EventTarget::kQp, qp_index, qp.qpn.load(std::memory_order_relaxed)});
}

}  // namespace verbatim::softverbs
