#include "rma/context_set.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "rma/context_posting.h"
#include "rma/work_id.h"
#include "verbs/qp.h"

namespace verbatim::rma {

ContextSet::ContextSet(ContextSetParts parts, std::size_t contexts, std::size_t peers)
    : parts_(std::move(parts)),
      contexts_(static_cast<std::uint32_t>(contexts)),
      queues_per_context_(peers + 1),
      ranks_(parts_.ranks.ranks()),
      fetched_{parts_.scratch.address(), kSignalBytes, parts_.scratch.lkey(0)},
      queues_(contexts * (peers + 1)),
      paths_(peers) {
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    queues_[i].context = static_cast<std::uint32_t>(i / (peers + 1));
    queues_[i].peer = static_cast<std::uint32_t>(i % (peers + 1));
  }
}

PeerQueue* ContextSet::find_queue(Target target) const noexcept {
  const auto context = static_cast<std::uint32_t>(target.context);
  if (context >= contexts_ || target.rank >= ranks_) return nullptr;
  return queue_of_[std::size_t{context} * ranks_ + target.rank];
}

ErrorKind ContextSet::flush(Target target, const Memory* memory, void** request) noexcept {
  *request = nullptr;
  if (find_queue(target) == nullptr) return log_refusal(target, "no such context, or a rank that is not spoken to");
  if (memory == nullptr || !memory->device_memory || memory->own.bytes == 0 || parts_.config.flush_disabled) {
    return failures().kind();
  }
  target.rank = parts_.ranks.rank();
  const Operation read{.local = parts_.scratch.address(),
                       .remote = memory->own.address,
                       .bytes = 1,
                       .lkey = parts_.scratch.lkey(0),
                       .rkey = memory->own.rkey,
                       .remote_memory = memory};
  return start_held(target, *find_queue(target), OperationKind::kFlush, read, request);
}

ErrorKind ContextSet::get(Target target, Part remote, std::uint64_t bytes, Part local, void** request) noexcept {
  if (start_usual<OperationKind::kGet>(target, local, bytes, remote, {}, request)) {
    return batch_.end_operation() ? post_full_batch() : ErrorKind::kNone;
  }
  return start_unusual({target, OperationKind::kGet, local, remote, bytes, {}}, request);
}

ErrorKind ContextSet::put_unusual(int context, std::uint64_t source_offset, const Memory* source, std::uint64_t bytes,
                                  std::uint64_t target_offset, const Memory* target, std::uint32_t rank,
                                  void** request) noexcept {
  return start_unusual({.target = {context, rank},
                        .kind = OperationKind::kPut,
                        .local = {source, source_offset},
                        .remote = {target, target_offset},
                        .bytes = bytes,
                        .signal = {}},
                       request);
}

ErrorKind ContextSet::start_unusual(const Call& call, void** request) noexcept {
  *request = nullptr;
  const Target target = call.target;
  PeerQueue* const queue = find_queue(target);
  if (queue == nullptr) return log_refusal(target, "no such context, or a rank that is not spoken to");
  Operation operation;
  if (call.bytes != 0) {
    if (call.local.memory == nullptr || call.remote.memory == nullptr) {
      return log_refusal(target, "no registered memory");
    }
    if (!contain(call.bytes, call.local, call.remote, target.rank)) {
      return log_refusal(target, "bytes outside the registered memory");
    }
    set_data(operation, call.bytes, call.local, call.remote, target.rank);
    operation.local_memory = call.local.memory;
    operation.remote_memory = call.remote.memory;
  }
  if (has_signal(call.kind)) {
    if (!contains_word(call.signal.word, target.rank)) {
      return log_refusal(target, "the word of the signal is not in registered memory, or not at a multiple of 8 bytes");
    }
    set_signal(operation, call.signal, target.rank);
    operation.signal_memory = call.signal.word.memory;
  }
  const bool whole = call.bytes <= max_message_bytes_ && (call.bytes != 0 || call.kind == OperationKind::kSignal);
  if (!whole || failures().flags() != 0 || queue->free_slot == nullptr || queue->free_work < entries_of(call.kind)) {
    return start_held(target, *queue, call.kind, operation, request);
  }
  if (!batch_.is_empty()) post_batch();
  if (failures().has_failed()) return failures().kind();
  batch_.set_queue(queue);
  batch_target_ = target;
  append(*queue, call.kind, operation, request);
  return batch_.end_operation() ? post_full_batch() : ErrorKind::kNone;
}

ErrorKind ContextSet::start_held(Target target, PeerQueue& queue, OperationKind kind, const Operation& operation,
                                 void** request) noexcept {
  if (queue.free_slot == nullptr) return log_refusal(target, "more requests than may be outstanding");
  if (failures().has_failed()) return failures().kind();
  // A rank that has closed takes nothing more.
  if (const ErrorKind closed = check_closed(target.rank, 0); closed != ErrorKind::kNone) return closed;
  Request& slot = *queue.free_slot;
  queue.free_slot = slot.next;
  slot.work = {Request::State::kPending, kind, entries_of(kind), false};
  slot.bytes = operation.bytes;
  slot.operation = operation;
  slot.posted = 0;
  ++queue.counts.begun[static_cast<std::size_t>(kind)];
  if (failover_ != nullptr && kind == OperationKind::kFlush) {
    begin_reads(slot, (1U << parts_.ports.size()) - 1);
    post_reads();
  } else if (may_batch(queue, kind, operation.bytes)) {
    add_to_batch(target, queue, slot);
  } else {
    hold(queue, slot);
  }
  if (failures().has_failed()) return failures().kind();
  *request = &slot;
  return ErrorKind::kNone;
}

ErrorKind ContextSet::post_full_batch() noexcept {
  post_batch();
  return ErrorKind::kNone;
}

void ContextSet::hold(PeerQueue& queue, Request& request) noexcept {
  if (!batch_.is_empty()) post_batch();
  (queue.held_first == nullptr ? queue.held_first : queue.held_last->next) = &request;
  request.next = nullptr;
  queue.held_last = &request;
  post_held(queue);
}

// After a failure nothing: what comes behind a part that was not posted would announce it.
void ContextSet::post_held(PeerQueue& queue) noexcept {
  if (failures().has_failed()) return;
  queue.held_work += std::exchange(queue.free_work, 0);
  if (failover_ != nullptr && !find_lane(queue)) return;
  while (queue.held_first != nullptr && queue.held_work != 0) {
    Request& request = *queue.held_first;
    if (!post_piece(queue, request)) return;
    if (has_signal(request.work.kind) ? request.work.signal_posted : request.posted == request.bytes) {
      queue.held_first = std::exchange(request.next, nullptr);
    }
  }
  if (queue.held_first == nullptr) queue.free_work = std::exchange(queue.held_work, 0);
}

void ContextSet::fill_piece(PeerQueue& queue, Request& request, WorkRequest& work) noexcept {
  const bool ends_with_data = !has_signal(request.work.kind);
  Operation piece = request.operation;
  piece.bytes = std::min(request.bytes - request.posted, max_message_bytes_);
  SentWork::Entry entry{.request = &request, .start = request.posted};
  if (!ends_with_data && request.posted == request.bytes) {
    request.work.signal_posted = true;
    entry.kind = SentWork::Kind::kSignal;
    entry.last = true;
    fill_add(work, request.operation, WorkId::make_piece(request, true));
  } else {
    piece.local += request.posted;
    piece.remote += request.posted;
    request.posted += piece.bytes;
    entry.last = ends_with_data && request.posted == request.bytes;
    if (reads(request.work.kind)) entry.kind = SentWork::Kind::kGet;
    fill_transfer(work, piece, reads(request.work.kind) ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
                  WorkId::make_piece(request, entry.last), IBV_SEND_SIGNALED);
    if (piece.bytes == 0) work.request.num_sge = 0;
  }
  if (failover_ != nullptr) {
    const bool is_signal = entry.kind == SentWork::Kind::kSignal;
    // The operation has the keys of the first lane.
    if (queue.active != queue.qp.get()) set_lane_keys(work, queue, request.operation, is_signal);
    queue.sent->add(entry, is_signal ? 1 : packets_of(piece.bytes, queue.packet_shift));
  }
}

bool ContextSet::post_piece(PeerQueue& queue, Request& request) noexcept {
  WorkRequest work;
  work.request.sg_list = &work.segment;
  work.request.num_sge = 1;
  fill_piece(queue, request, work);
  --queue.held_work;
  const int returned = post_send(queue.active, work.request);
  if (returned != 0) fail_post(queue, returned);
  return returned == 0;
}

void ContextSet::complete_piece(std::uint64_t id) noexcept {
  if (WorkId::is_of_lanes(id)) return complete_of_lanes(id, true);
  Request& request = WorkId::request(id);
  PeerQueue& queue = *request.queue;
  ++queue.counts.pieces;
  if (queue.sent != nullptr) queue.sent->remove_first();
  if (WorkId::is_last_piece(id)) end_operation(request);
  ++(queue.held_first != nullptr ? queue.held_work : queue.free_work);
  if (queue.held_first != nullptr) post_held(queue);
}

ErrorKind ContextSet::progress() noexcept {
  if (!batch_.is_empty()) post_batch();
  poll(cq_.get());
  if (failover_ != nullptr) look_after_lanes();
  return failures().kind();
}

ErrorKind ContextSet::check_failure(const Request& request) noexcept {
  if (failover_ != nullptr) look_after_lanes();
  if (failures().has_failed()) return failures().kind();
  const PeerQueue& queue = *request.queue;
  if (is_own(queue.peer)) return ErrorKind::kNone;
  // A rank that has closed keeps its QPs for so long, and acknowledges what is repeated.
  return check_closed(paths_[queue.peer].rank, parts_.config.close_timeout_ms * kNanosecondsPerMillisecond);
}

ErrorKind ContextSet::log_refusal(Target target, const char* what) const noexcept {
  VERBATIM_WARN(
      "a call for rank %u in RMA context %d is refused: %s. Next: this is a defect of the program that calls the "
      "plugin",
      target.rank, target.context, what);
  return ErrorKind::kArgument;
}

ErrorKind ContextSet::check_closed(std::uint32_t rank, std::uint64_t grace_ns) noexcept {
  if (rank == parts_.ranks.rank()) return ErrorKind::kNone;
  const PeerRank& peer = parts_.ranks.at(rank);
  // After another end the communicator fails.
  if (peer.channel->end() != PeerChannel::End::kClosed) return ErrorKind::kNone;
  if (grace_ns != 0 && monotonic_ns() < peer.channel->ended_ns() + grace_ns) return ErrorKind::kNone;
  parts_.failures.fail(ErrorKind::kRemote, Failures::Origin::kHere, [&] {
    return Failure{peer.name + " has closed its RMA communicator, and rank " + std::to_string(parts_.ranks.rank()) +
                       " on " + parts_.host_name + " still puts to it",
                   {"their calls do not match", "look at " + peer.name + " first"},
                   facts(queues_[peer_of_rank_[rank]])};
  });
  return failures().kind();
}

bool ContextSet::finish(std::uint64_t deadline_ns) noexcept {
  const auto is_pending = [](const Request& request) { return request.work.state == Request::State::kPending; };
  const auto is_busy = [&](const PeerQueue& queue) { return std::ranges::any_of(queue.slots, is_pending); };
  while (progress() == ErrorKind::kNone) {
    if (std::ranges::none_of(queues_, is_busy)) return true;
    if (monotonic_ns() >= deadline_ns) return false;
    ::sched_yield();
  }
  return false;
}

std::size_t ContextSet::qps() const {
  std::size_t number = flush_qps_.size();
  for (const PeerQueue& queue : queues_) number += 1 + queue.further_qps.size();
  return number;
}

void ContextSet::abort() const {
  for (const PeerQueue& queue : queues_) {
    for (std::uint32_t lane = 0; lane <= queue.further_qps.size(); ++lane) {
      const Port& port = lane_port(lane);
      // One that is not used has nothing outstanding, and may be in any state.
      if (failover_ != nullptr && !failover_->is_used(queue.peer, lane)) continue;
      const Status moved = to_error(queue.qp_of(lane), *port.device);
      if (!moved) VERBATIM_WARN("%s: %s", port.name.c_str(), to_string(moved.error()).c_str());
    }
  }
}

}  // namespace verbatim::rma
