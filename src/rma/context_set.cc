#include "rma/context_set.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "rma/work_id.h"

namespace verbatim::rma {
namespace {

constexpr int kPollBatch = 8;
// Acknowledgements of a rank that closes may still be on the way.
constexpr std::uint64_t kCloseGraceNs = 200 * kNanosecondsPerMillisecond;

}  // namespace

ContextSet::ContextSet(ContextSetParts parts, std::size_t contexts, std::size_t peers)
    : parts_(std::move(parts)), contexts_(contexts), queues_(contexts * (peers + 1)), paths_(peers) {
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    queues_[i].context = static_cast<std::uint32_t>(i / (peers + 1));
    queues_[i].peer = static_cast<std::uint32_t>(i % (peers + 1));
  }
}

PeerQueue* ContextSet::find_queue(const Target& target) noexcept {
  const auto context = static_cast<std::size_t>(target.context);
  if (context >= contexts_ || target.rank >= peer_of_rank_.size()) return nullptr;
  const std::uint32_t peer = peer_of_rank_[target.rank];
  return peer != kNoSlot ? &queues_[context * (paths_.size() + 1) + peer] : nullptr;
}

// nullptr, or why the bytes cannot be moved.
const char* ContextSet::set_data(Operation& operation, std::uint64_t bytes, const Part& local, const Part& remote,
                                 std::uint32_t rank) noexcept {
  operation.bytes = bytes;
  if (bytes == 0) return nullptr;
  if (local.memory == nullptr || remote.memory == nullptr || rank >= remote.memory->ranks.size()) {
    return "no registered memory";
  }
  const RankMemory& own = local.memory->own;
  const RankMemory& theirs = remote.memory->ranks[rank];
  if (!own.contains(local.offset, bytes) || !theirs.contains(remote.offset, bytes)) {
    return "bytes outside the registered memory";
  }
  operation.local = own.address + local.offset;
  operation.lkey = local.memory->lkey;
  operation.remote = theirs.address + remote.offset;
  operation.rkey = theirs.rkey;
  return nullptr;
}

const char* ContextSet::set_signal(Operation& operation, const Signal& signal, std::uint32_t rank) noexcept {
  if (signal.word.memory == nullptr || rank >= signal.word.memory->ranks.size()) {
    return "no registered memory for the signal";
  }
  const RankMemory& memory = signal.word.memory->ranks[rank];
  operation.signal = memory.address + signal.word.offset;
  if (!memory.contains(signal.word.offset, kSignalBytes) || operation.signal % kSignalBytes != 0) {
    return "a signal outside the registered memory or not at a multiple of 8 bytes";
  }
  operation.signal_rkey = memory.rkey;
  operation.signal_value = signal.value;
  operation.has_signal = true;
  return nullptr;
}

ErrorKind ContextSet::put(const Target& target, const Part& source, std::uint64_t bytes, const Part& destination,
                          void** request) noexcept {
  *request = nullptr;
  Operation operation;
  const char* const problem = set_data(operation, bytes, source, destination, target.rank);
  return problem == nullptr ? post(target, operation, request) : refuse(target, problem);
}

ErrorKind ContextSet::put_signal(const Target& target, const Part& source, std::uint64_t bytes, const Part& destination,
                                 const Signal& signal, void** request) noexcept {
  *request = nullptr;
  Operation operation;
  operation.has_data = bytes != 0;
  const char* problem = set_data(operation, bytes, source, destination, target.rank);
  if (problem == nullptr) problem = set_signal(operation, signal, target.rank);
  return problem == nullptr ? post(target, operation, request) : refuse(target, problem);
}

ErrorKind ContextSet::get(const Target& target, const Part& remote, std::uint64_t bytes, const Part& local,
                          void** request) noexcept {
  *request = nullptr;
  Operation operation;
  operation.opcode = IBV_WR_RDMA_READ;
  const char* const problem = set_data(operation, bytes, local, remote, target.rank);
  return problem == nullptr ? post(target, operation, request) : refuse(target, problem);
}

ErrorKind ContextSet::flush(const Target& target, const Memory* memory, void** request) noexcept {
  *request = nullptr;
  if (find_queue(target) == nullptr) return refuse(target, "no such context, or a rank that is not spoken to");
  if (memory == nullptr || !memory->device_memory || memory->own.bytes == 0 || parts_.config.flush_disabled) {
    return failures().kind();
  }
  Operation operation;
  operation.opcode = IBV_WR_RDMA_READ;
  operation.bytes = 1;
  operation.local = parts_.scratch;
  operation.lkey = parts_.scratch_lkey;
  operation.remote = memory->own.address;
  operation.rkey = memory->own.rkey;
  return post({target.context, parts_.ranks.rank()}, operation, request);
}

ErrorKind ContextSet::post(const Target& target, const Operation& operation, void** request) noexcept {
  PeerQueue* const queue = find_queue(target);
  if (queue == nullptr) [[unlikely]]
    return refuse(target, "no such context, or a rank that is not spoken to");
  const std::uint32_t flags = failures().flags();
  if (flags != 0) [[unlikely]] {
    if ((flags & Failures::kFailed) != 0) return failures().kind();
    if (const ErrorKind closed = check_closed(target.rank, 0); closed != ErrorKind::kNone) return closed;
  }
  if (queue->free_slot == kNoSlot) [[unlikely]]
    return refuse(target, "more requests than may be outstanding");
  Request& slot = queue->slots[queue->free_slot];
  queue->free_slot = slot.next;
  slot.next = kNoSlot;
  slot.state = Request::State::kPending;
  slot.operation = operation;
  const std::uint32_t entries = operation.has_signal ? 2 : 1;
  if (queue->held_first == kNoSlot && queue->free_work >= entries && operation.bytes <= max_message_bytes_) [[likely]] {
    if (!post_work(*queue, slot, operation, true)) return failures().kind();
  } else {
    hold(*queue, slot);
    if (failures().has_failed()) return failures().kind();
  }
  *request = &slot;
  return ErrorKind::kNone;
}

// The last work request is signalled. `last`: its completion ends the request.
bool ContextSet::post_work(PeerQueue& queue, const Request& request, const Operation& operation, bool last) noexcept {
  ibv_send_wr* const first = operation.has_data ? &queue.data : &queue.signal;
  const std::uint32_t entries = operation.has_data && operation.has_signal ? 2 : 1;
  const std::uint64_t wr_id = WorkId::make(request.index, request.queue, entries, last);
  if (operation.has_data) {
    queue.data_segment = {operation.local, static_cast<std::uint32_t>(operation.bytes), operation.lkey};
    queue.data.wr_id = wr_id;
    queue.data.next = operation.has_signal ? &queue.signal : nullptr;
    queue.data.sg_list = operation.bytes != 0 ? &queue.data_segment : nullptr;
    queue.data.num_sge = operation.bytes != 0 ? 1 : 0;
    queue.data.opcode = operation.opcode;
    queue.data.send_flags = operation.has_signal ? 0U : unsigned{IBV_SEND_SIGNALED};
    queue.data.wr.rdma.remote_addr = operation.remote;
    queue.data.wr.rdma.rkey = operation.rkey;
  }
  if (operation.has_signal) {
    queue.signal.wr_id = wr_id;
    queue.signal.wr.atomic.remote_addr = operation.signal;
    queue.signal.wr.atomic.rkey = operation.signal_rkey;
    queue.signal.wr.atomic.compare_add = operation.signal_value;
  }
  queue.free_work -= entries;
  ibv_send_wr* refused = nullptr;
  const int returned = ibv_post_send(queue.qp.get(), first, &refused);
  if (returned == 0) [[likely]]
    return true;
  fail_post(request, returned);
  return false;
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
  Operation piece = request.operation;
  if (request.data_posted) {
    request.operation.has_signal = false;
    piece.has_data = false;
    return post_work(queue, request, piece, true);
  }
  piece.bytes = std::min(piece.bytes - request.posted, max_message_bytes_);
  piece.local += request.posted;
  piece.remote += request.posted;
  piece.has_signal = false;
  request.posted += piece.bytes;
  request.data_posted = request.posted == request.operation.bytes;
  return post_work(queue, request, piece, request.data_posted && !request.operation.has_signal);
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

ErrorKind ContextSet::refuse(const Target& target, const char* what) const noexcept {
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
