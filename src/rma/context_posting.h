// The part of ContextSet that every put, get, signal and test runs.
#pragma once

#include "rma/context_set.h"
#include "rma/work_id.h"

namespace verbatim::rma {

// Whether the bytes are in registered memory, here and at the rank. The order keeps the compiler from merging checks
// into longer code.
[[gnu::always_inline]] inline bool ContextSet::contain(std::uint64_t bytes, Part local, Part remote,
                                                       std::uint32_t rank) noexcept {
  if (local.memory == nullptr || !local.memory->own.contains(local.offset, bytes)) [[unlikely]]
    return false;
  return remote.memory != nullptr && rank < remote.memory->rank_count &&
         remote.memory->ranks[rank].contains(remote.offset, bytes);
}

// Whether it is an aligned word in registered memory.
[[gnu::always_inline]] inline bool ContextSet::contains_word(Part word, std::uint32_t rank) noexcept {
  if (word.memory == nullptr || rank >= word.memory->rank_count) [[unlikely]]
    return false;
  const RankMemory& memory = word.memory->ranks[rank];
  return memory.contains(word.offset, kSignalBytes) && (memory.address + word.offset) % kSignalBytes == 0;
}

// These two are called after the checks.
[[gnu::always_inline]] inline void ContextSet::set_data(Operation& operation, std::uint64_t bytes, Part local,
                                                        Part remote, std::uint32_t rank) noexcept {
  const RankMemory& theirs = remote.memory->ranks[rank];
  operation.bytes = bytes;
  operation.local = local.memory->own.address + local.offset;
  operation.lkey = local.memory->lkey;
  operation.remote = theirs.address + remote.offset;
  operation.rkey = theirs.rkey;
}

[[gnu::always_inline]] inline void ContextSet::set_signal(Operation& operation, Signal signal,
                                                          std::uint32_t rank) noexcept {
  const RankMemory& theirs = signal.word.memory->ranks[rank];
  operation.signal = theirs.address + signal.word.offset;
  operation.signal_rkey = theirs.rkey;
  operation.signal_value = signal.value;
}

[[gnu::always_inline]] inline void ContextSet::fill_transfer(WorkRequest& work, const Operation& operation,
                                                             ibv_wr_opcode opcode, std::uint64_t id,
                                                             unsigned flags) noexcept {
  work.segment.addr = operation.local;
  work.segment.length = static_cast<std::uint32_t>(operation.bytes);
  work.segment.lkey = operation.lkey;
  work.request.wr_id = id;
  work.request.opcode = opcode;
  work.request.send_flags = flags;
  work.request.wr.rdma.remote_addr = operation.remote;
  work.request.wr.rdma.rkey = operation.rkey;
}

[[gnu::always_inline]] inline void ContextSet::fill_add(WorkRequest& work, const Operation& operation,
                                                        std::uint64_t id) const noexcept {
  work.segment = fetched_;
  work.request.wr_id = id;
  work.request.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  work.request.send_flags = IBV_SEND_SIGNALED;
  work.request.wr.atomic.remote_addr = operation.signal;
  work.request.wr.atomic.rkey = operation.signal_rkey;
  work.request.wr.atomic.compare_add = operation.signal_value;
}

// Puts the work requests of an operation in the batch; the last one is signalled.
[[gnu::always_inline]] inline void ContextSet::append(PeerQueue& queue, OperationKind kind, const Operation& operation,
                                                      void** request) noexcept {
  const std::uint8_t entries = entries_of(kind);
  Request* const slot = queue.free_slot;
  queue.free_slot = slot->next;
  queue.free_work -= entries;
  slot->work = {Request::State::kPending, kind, entries, false};
  slot->bytes = operation.bytes;
  ++queue.counts.begun[static_cast<std::size_t>(kind)];
  const std::uint64_t id = WorkId::make(*slot);
  if (kind != OperationKind::kSignal) {
    fill_transfer(batch_.add(), operation, reads(kind) ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, id,
                  has_signal(kind) ? 0U : unsigned{IBV_SEND_SIGNALED});
  }
  if (has_signal(kind)) fill_add(batch_.add(), operation, id);
  *request = slot;
}

// What is not as usual is not started: a wrong argument, a failure, another QP than that of the batch, no room in the
// send queue, zero bytes, a message of several pieces.
template <OperationKind kKind>
[[gnu::always_inline]] inline bool ContextSet::start_usual(Target target, Part local, std::uint64_t bytes, Part remote,
                                                           Signal signal, void** request) noexcept {
  constexpr bool kHasData = kKind != OperationKind::kSignal;
  PeerQueue* const queue = batch_.queue();
  if (target != batch_target_ || queue->free_slot == nullptr || queue->free_work < entries_of(kKind) ||
      failures().flags() != 0 ||
      (kHasData && (bytes - 1 >= max_message_bytes_ || !contain(bytes, local, remote, target.rank))) ||
      (has_signal(kKind) && !contains_word(signal.word, target.rank))) [[unlikely]] {
    return false;
  }
  Operation operation;
  if constexpr (kHasData) set_data(operation, bytes, local, remote, target.rank);
  if constexpr (has_signal(kKind)) set_signal(operation, signal, target.rank);
  append(*queue, kKind, operation, request);
  return true;
}

[[gnu::always_inline]] inline ErrorKind ContextSet::put(int context, std::uint64_t source_offset, const Memory* source,
                                                        std::uint64_t bytes, std::uint64_t target_offset,
                                                        const Memory* target, std::uint32_t rank,
                                                        void** request) noexcept {
  if (!start_usual<OperationKind::kPut>({context, rank}, {source, source_offset}, bytes, {target, target_offset}, {},
                                        request)) [[unlikely]] {
    return put_unusual(context, source_offset, source, bytes, target_offset, target, rank, request);
  }
  return batch_.end_operation() ? post_full_batch() : ErrorKind::kNone;
}

[[gnu::always_inline]] inline ErrorKind ContextSet::put_signal(Target target, Part source, std::uint64_t bytes,
                                                               Part destination, Signal signal,
                                                               void** request) noexcept {
  const bool usual = bytes != 0
                         ? start_usual<OperationKind::kPutSignal>(target, source, bytes, destination, signal, request)
                         : start_usual<OperationKind::kSignal>(target, source, bytes, destination, signal, request);
  if (!usual) [[unlikely]] {
    const OperationKind kind = bytes != 0 ? OperationKind::kPutSignal : OperationKind::kSignal;
    return start_unusual({target, kind, source, destination, bytes, signal}, request);
  }
  return batch_.end_operation() ? post_full_batch() : ErrorKind::kNone;
}

[[gnu::always_inline]] inline void ContextSet::count_completed(const Request& request) noexcept {
  QueueCounts& counts = request.queue->counts;
  const auto kind = static_cast<std::size_t>(request.work.kind);
  ++counts.completed[kind];
  counts.bytes[kind] += request.bytes;
}

[[gnu::always_inline]] inline void ContextSet::end_operation(Request& request) noexcept {
  count_completed(request);
  if (!request.queue->flushes_ports || !becomes_flush(request)) request.work.state = Request::State::kDone;
}

[[gnu::always_inline]] inline void ContextSet::complete(std::uint64_t id) noexcept {
  if (WorkId::is_piece(id)) [[unlikely]]
    return complete_piece(id);
  Request& request = WorkId::whole_request(id);
  PeerQueue& queue = *request.queue;
  request.work.state = Request::State::kDone;
  queue.free_work += request.work.entries;
  count_completed(request);
  if (queue.held_first != nullptr) [[unlikely]]
    post_held(queue);
}

// Whether something has completed.
[[gnu::always_inline]] inline bool ContextSet::poll(ibv_cq* cq) noexcept {
  polled_ = true;
  ibv_wc completions[kPollBatch];
  const int polled = ibv_poll_cq(cq, kPollBatch, completions);
  if (polled <= 0) {
    if (polled < 0) [[unlikely]]
      fail_poll();
    return false;
  }
  const ibv_wc* completion = completions;
  auto left = static_cast<std::size_t>(polled);
  do {
    if (completion->status == IBV_WC_SUCCESS) [[likely]] {
      complete(completion->wr_id);
    } else {
      fail_completion({completion, left});
    }
    ++completion;
  } while (--left != 0);
  return true;
}

[[gnu::always_inline]] inline void ContextSet::post_batch() noexcept {
  if (const int returned = batch_.post(batch_.queue()->active); returned != 0) [[unlikely]]
    fail_post(*batch_.queue(), returned);
}

// Returns the slot of a request that is done.
[[gnu::always_inline]] inline ErrorKind ContextSet::end_test(Request& request, int* done) noexcept {
  PeerQueue& queue = *request.queue;
  request.work.state = Request::State::kFree;
  request.next = queue.free_slot;
  queue.free_slot = &request;
  *done = 1;
  return ErrorKind::kNone;
}

[[gnu::noinline]] inline ErrorKind ContextSet::post_and_end_test(Request& request, int* done) noexcept {
  post_batch();
  return end_test(request, done);
}

[[gnu::noinline]] inline ErrorKind ContextSet::test_pending(Request& request, int* done) noexcept {
  if (!batch_.is_empty()) post_batch();
  if (poll(cq_.get()) && request.work.state == Request::State::kDone) return end_test(request, done);
  *done = 0;
  return failures().flags() == 0 ? ErrorKind::kNone : check_failure(request);
}

// With the rest in functions of their own, a request that an earlier poll has completed needs no frame on the stack.
[[gnu::always_inline]] inline ErrorKind ContextSet::test(Request& request, int* done) noexcept {
  ContextSet& set = *request.set;
  if (request.work.state != Request::State::kDone) return set.test_pending(request, done);
  if (!set.batch_.is_empty()) [[unlikely]]
    return set.post_and_end_test(request, done);
  return end_test(request, done);
}

}  // namespace verbatim::rma
