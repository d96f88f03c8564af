#include "rma/context_set.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "rma/context_posting.h"
#include "rma/work_id.h"

namespace verbatim::rma {
namespace {

constexpr int kPollBatch = 8;
// Acknowledgements of a rank that closes may still be on the way.
constexpr std::uint64_t kCloseGraceNs = 200 * kNanosecondsPerMillisecond;

}  // namespace

ContextSet::ContextSet(ContextSetParts parts, std::size_t contexts, std::size_t peers)
    : parts_(std::move(parts)),
      contexts_(contexts),
      queues_per_context_(peers + 1),
      ranks_(parts_.ranks.ranks()),
      queues_(contexts * (peers + 1)),
      paths_(peers) {
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    queues_[i].context = static_cast<std::uint32_t>(i / (peers + 1));
    queues_[i].peer = static_cast<std::uint32_t>(i % (peers + 1));
  }
}

ErrorKind ContextSet::flush(Target target, const Memory* memory, void** request) noexcept {
  *request = nullptr;
  if (find_queue(target) == nullptr) return refuse(target, {}, {}, 0);
  if (memory == nullptr || !memory->device_memory || memory->own.bytes == 0 || parts_.config.flush_disabled) {
    return failures().kind();
  }
  PeerQueue& queue = *find_queue({target.context, parts_.ranks.rank()});
  Request* const slot = take_slot(queue);
  if (slot == nullptr) return refuse(target, {}, {}, 0);
  if (failures().has_failed()) return failures().kind();
  slot->operation = {.local = parts_.scratch,
                     .remote = memory->own.address,
                     .bytes = 1,
                     .lkey = parts_.scratch_lkey,
                     .rkey = memory->own.rkey,
                     .opcode = IBV_WR_RDMA_READ};
  return start<true, false>(queue, *slot, request);
}

// A rank that has closed takes nothing more.
ErrorKind ContextSet::check_call(Target target) noexcept {
  return failures().has_failed() ? failures().kind() : check_closed(target.rank, 0);
}

// A message of several pieces, or one for which the send queue has no room now.
void ContextSet::hold(PeerQueue& queue, Request& request) noexcept {
  request.posted = 0;
  request.data_posted = !request.operation.has_data;
  if (queue.held_first == kNoSlot) {
    queue.held_first = request.index;
  } else {
    queue.slots[queue.held_last].next = request.index;
  }
  request.next = kNoSlot;
  queue.held_last = request.index;
  post_held(queue);
}

void ContextSet::post_held(PeerQueue& queue) noexcept {
  while (queue.held_first != kNoSlot && queue.free_work != 0) {
    Request& request = queue.slots[queue.held_first];
    if (!post_piece(queue, request)) return;
    if (!request.data_posted || request.operation.has_signal) continue;
    queue.held_first = std::exchange(request.next, kNoSlot);
  }
}

// One work request of a request that is held back. operation.has_signal becomes false when the signal is posted.
bool ContextSet::post_piece(PeerQueue& queue, Request& request) noexcept {
  Operation& operation = request.operation;
  std::uint64_t id = WorkId::with_entries(request.work_id, 1);
  int returned = 0;
  if (request.data_posted) {
    operation.has_signal = false;
    returned = post_work<false, true>(queue, operation, id);
  } else {
    Operation piece = operation;
    piece.bytes = std::min(piece.bytes - request.posted, max_message_bytes_);
    piece.local += request.posted;
    piece.remote += request.posted;
    request.posted += piece.bytes;
    request.data_posted = request.posted == operation.bytes;
    if (!request.data_posted || operation.has_signal) id &= ~WorkId::kLast;
    returned = post_work<true, false>(queue, piece, id);
  }
  if (returned != 0) fail_post(request, returned);
  return returned == 0;
}

void ContextSet::poll() noexcept {
  ibv_wc completions[kPollBatch];
  const int polled = ibv_poll_cq(cq_.get(), kPollBatch, completions);
  for (int i = 0; i < polled; ++i) {
    if (completions[i].status == IBV_WC_SUCCESS) [[likely]] {
      complete(completions[i]);
    } else {
      fail_completion(std::span<const ibv_wc>(completions + i, completions + polled));
    }
  }
  if (polled < 0) [[unlikely]]
    fail_poll();
}

void ContextSet::complete(const ibv_wc& completion) noexcept {
  const std::uint64_t id = completion.wr_id;
  PeerQueue& queue = queues_[WorkId::queue(id)];
  queue.free_work += WorkId::entries(id);
  if (WorkId::is_last(id)) queue.slots[WorkId::slot(id)].state = Request::State::kDone;
  if (queue.held_first != kNoSlot) [[unlikely]]
    post_held(queue);
}

ErrorKind ContextSet::test(Request& request, int* done) noexcept {
  ContextSet& set = *request.set;
  if (request.state != Request::State::kDone) {
    set.poll();
    if (request.state != Request::State::kDone) {
      *done = 0;
      return set.failures().flags() == 0 ? ErrorKind::kNone : set.check_failure(request);
    }
  }
  PeerQueue& queue = set.queues_[request.queue];
  ++queue.completed;
  queue.completed_bytes += request.operation.bytes;
  request.state = Request::State::kFree;
  request.next = queue.free_slot;
  queue.free_slot = request.index;
  *done = 1;
  return ErrorKind::kNone;
}

ErrorKind ContextSet::progress() noexcept {
  poll();
  return failures().kind();
}

ErrorKind ContextSet::check_failure(const Request& request) noexcept {
  if (failures().has_failed()) return failures().kind();
  const PeerQueue& queue = queues_[request.queue];
  return is_own(queue) ? ErrorKind::kNone : check_closed(paths_[queue.peer].rank, kCloseGraceNs);
}

ErrorKind ContextSet::refuse(Target target, Part local, Part remote, std::uint64_t bytes) noexcept {
  PeerQueue* const queue = find_queue(target);
  if (queue == nullptr) return log_refusal(target, "no such context, or a rank that is not spoken to");
  if (queue->free_slot == kNoSlot) return log_refusal(target, "more requests than may be outstanding");
  if (bytes != 0 && (local.memory == nullptr || remote.memory == nullptr)) {
    return log_refusal(target, "no registered memory");
  }
  return log_refusal(target, "bytes outside the registered memory");
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
  if (peer.channel->end() == Channel::End::kOpen) return ErrorKind::kNone;
  if (grace_ns != 0 && monotonic_ns() < peer.channel->ended_ns() + grace_ns) return ErrorKind::kNone;
  parts_.failures.fail(ErrorKind::kRemote, Failures::Origin::kHere, [&] {
    return Failure{peer.name + " has closed its RMA communicator, and rank " + std::to_string(parts_.ranks.rank()) +
                       " on " + parts_.host_name + " still puts to it",
                   {"their calls do not match", "look at " + peer.name + " first"},
                   facts(queues_[peer_of_rank_[rank]])};
  });
  return failures().kind();
}

bool ContextSet::has_outstanding() noexcept {
  poll();
  for (const PeerQueue& queue : queues_) {
    for (const Request& request : queue.slots) {
      if (request.state == Request::State::kPending) return true;
    }
  }
  return false;
}

void ContextSet::abort() const {
  for (const PeerQueue& queue : queues_) {
    const Status moved = to_error(queue.qp.get(), *parts_.port.device);
    if (!moved) VERBATIM_WARN("%s: %s", parts_.port.name.c_str(), to_string(moved.error()).c_str());
  }
}

}  // namespace verbatim::rma
