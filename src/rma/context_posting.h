// The part of ContextSet that every put, get and signal runs.
#pragma once

#include "rma/context_set.h"
#include "rma/work_id.h"

namespace verbatim::rma {

[[gnu::always_inline]] inline PeerQueue* ContextSet::find_queue(Target target) noexcept {
  const auto context = static_cast<std::size_t>(target.context);
  if (context >= contexts_ || target.rank >= ranks_) [[unlikely]]
    return nullptr;
  const std::uint32_t peer = peer_of_rank_[target.rank];
  return peer != kNoSlot ? &queues_[context * queues_per_context_ + peer] : nullptr;
}

[[gnu::always_inline]] inline bool ContextSet::set_data(Operation& operation, std::uint64_t bytes, Part local,
                                                        Part remote, std::uint32_t rank) noexcept {
  operation.bytes = bytes;
  if (bytes == 0) [[unlikely]]
    return true;
  if (local.memory == nullptr || remote.memory == nullptr || rank >= remote.memory->rank_count) [[unlikely]]
    return false;
  const RankMemory& own = local.memory->own;
  const RankMemory& theirs = remote.memory->ranks[rank];
  operation.local = own.address + local.offset;
  operation.lkey = local.memory->lkey;
  operation.remote = theirs.address + remote.offset;
  operation.rkey = theirs.rkey;
  return own.contains(local.offset, bytes) && theirs.contains(remote.offset, bytes);
}

[[gnu::always_inline]] inline bool ContextSet::set_signal(Operation& operation, Signal signal,
                                                          std::uint32_t rank) noexcept {
  if (signal.word.memory == nullptr || rank >= signal.word.memory->rank_count) [[unlikely]]
    return false;
  const RankMemory& memory = signal.word.memory->ranks[rank];
  operation.signal = memory.address + signal.word.offset;
  operation.signal_rkey = memory.rkey;
  operation.signal_value = signal.value;
  return memory.contains(signal.word.offset, kSignalBytes) && operation.signal % kSignalBytes == 0;
}

[[gnu::always_inline]] inline Request* ContextSet::take_slot(PeerQueue& queue) noexcept {
  if (queue.free_slot == kNoSlot) [[unlikely]]
    return nullptr;
  return &queue.slots[queue.free_slot];
}

// The last work request is signalled.
template <bool kHasData, bool kHasSignal>
[[gnu::always_inline]] inline int ContextSet::post_work(PeerQueue& queue, const Operation& operation,
                                                        std::uint64_t wr_id) noexcept {
  if constexpr (kHasData) {
    const bool empty = operation.bytes == 0;
    queue.data_segment.addr = operation.local;
    queue.data_segment.length = static_cast<std::uint32_t>(operation.bytes);
    queue.data_segment.lkey = operation.lkey;
    queue.data.wr_id = wr_id;
    queue.data.next = kHasSignal ? &queue.signal : nullptr;
    queue.data.sg_list = empty ? nullptr : &queue.data_segment;
    queue.data.num_sge = empty ? 0 : 1;
    queue.data.opcode = operation.opcode;
    queue.data.send_flags = kHasSignal ? 0U : unsigned{IBV_SEND_SIGNALED};
    queue.data.wr.rdma.remote_addr = operation.remote;
    queue.data.wr.rdma.rkey = operation.rkey;
  }
  if constexpr (kHasSignal) {
    queue.signal.wr_id = wr_id;
    queue.signal.wr.atomic.remote_addr = operation.signal;
    queue.signal.wr.atomic.rkey = operation.signal_rkey;
    queue.signal.wr.atomic.compare_add = operation.signal_value;
  }
  queue.free_work -= kHasData && kHasSignal ? 2 : 1;
  ibv_send_wr* refused = nullptr;
  return ibv_post_send(queue.qp.get(), kHasData ? &queue.data : &queue.signal, &refused);
}

template <bool kHasData, bool kHasSignal>
[[gnu::always_inline]] inline ErrorKind ContextSet::start(PeerQueue& queue, Request& slot, void** request) noexcept {
  constexpr std::uint32_t kEntries = kHasData && kHasSignal ? 2 : 1;
  queue.free_slot = slot.next;
  slot.state = Request::State::kPending;
  slot.operation.has_data = kHasData;
  slot.operation.has_signal = kHasSignal;
  const bool whole = !kHasData || slot.operation.bytes <= max_message_bytes_;
  if (whole && queue.held_first == kNoSlot && queue.free_work >= kEntries) [[likely]] {
    const int returned =
        post_work<kHasData, kHasSignal>(queue, slot.operation, WorkId::with_entries(slot.work_id, kEntries));
    if (returned != 0) [[unlikely]] {
      fail_post(slot, returned);
      return failures().kind();
    }
  } else {
    hold(queue, slot);
    if (failures().has_failed()) return failures().kind();
  }
  *request = &slot;
  return ErrorKind::kNone;
}

[[gnu::always_inline]] inline ErrorKind ContextSet::put(Target target, Part source, std::uint64_t bytes,
                                                        Part destination, void** request) noexcept {
  *request = nullptr;
  PeerQueue* const queue = find_queue(target);
  Request* const slot = queue != nullptr ? take_slot(*queue) : nullptr;
  if (slot == nullptr || !set_data(slot->operation, bytes, source, destination, target.rank)) [[unlikely]]
    return refuse(target, source, destination, bytes);
  if (failures().flags() != 0) [[unlikely]] {
    if (const ErrorKind ended = check_call(target); ended != ErrorKind::kNone) return ended;
  }
  slot->operation.opcode = IBV_WR_RDMA_WRITE;
  return start<true, false>(*queue, *slot, request);
}

[[gnu::always_inline]] inline ErrorKind ContextSet::put_signal(Target target, Part source, std::uint64_t bytes,
                                                               Part destination, Signal signal,
                                                               void** request) noexcept {
  *request = nullptr;
  PeerQueue* const queue = find_queue(target);
  Request* const slot = queue != nullptr ? take_slot(*queue) : nullptr;
  if (slot == nullptr || !set_data(slot->operation, bytes, source, destination, target.rank)) [[unlikely]]
    return refuse(target, source, destination, bytes);
  if (!set_signal(slot->operation, signal, target.rank)) [[unlikely]]
    return log_refusal(target, "the word of the signal is not in registered memory, or not at a multiple of 8 bytes");
  if (failures().flags() != 0) [[unlikely]] {
    if (const ErrorKind ended = check_call(target); ended != ErrorKind::kNone) return ended;
  }
  slot->operation.opcode = IBV_WR_RDMA_WRITE;
  return bytes != 0 ? start<true, true>(*queue, *slot, request) : start<false, true>(*queue, *slot, request);
}

[[gnu::always_inline]] inline ErrorKind ContextSet::get(Target target, Part remote, std::uint64_t bytes, Part local,
                                                        void** request) noexcept {
  *request = nullptr;
  PeerQueue* const queue = find_queue(target);
  Request* const slot = queue != nullptr ? take_slot(*queue) : nullptr;
  if (slot == nullptr || !set_data(slot->operation, bytes, local, remote, target.rank)) [[unlikely]]
    return refuse(target, local, remote, bytes);
  if (failures().flags() != 0) [[unlikely]] {
    if (const ErrorKind ended = check_call(target); ended != ErrorKind::kNone) return ended;
  }
  slot->operation.opcode = IBV_WR_RDMA_READ;
  return start<true, false>(*queue, *slot, request);
}

}  // namespace verbatim::rma
