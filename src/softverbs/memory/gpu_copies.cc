#include "softverbs/memory/gpu_copies.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "softverbs/host/with_memory.h"

namespace verbatim::softverbs {
namespace {

// How long a copy may take that the caller waits for. The owner of the GPU memory may be stopped.
constexpr std::uint64_t kTimeoutNs = kNanosecondsPerSecond / 2;
constexpr unsigned kSpins = 256;

// Of one QP: enough to keep copy engines busy in both directions, and few enough to leave some for other QPs.
constexpr std::uint32_t kMaxBuffers = 16;

// The next lane of a QP whose copies are all made by GPUs of other processes.
std::atomic<std::uint32_t> g_next_lane_at_peers{0};

std::byte* pointer(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(address);
}

void wait_a_little(unsigned turn) {
  turn < kSpins ? relax_cpu() : static_cast<void>(sched_yield());
}

}  // namespace

GpuCopies::~GpuCopies() {
  cancel();
}

void GpuCopies::begin(const ProcessView& target, CopyDirection direction, Spans& local, Spans& remote,
                      CopyProgress* sends, CopyProgress* arrivals) {
  Copy copy;
  copy.target = target.shared_from_this();
  copy.bytes = local.total();
  copy.sends = sends;
  copy.arrivals = arrivals;
  if (direction == CopyDirection::kToTarget) {
    add_pieces(copy, local, remote, direction, remote.gpu_memory());
  } else {
    add_pieces(copy, remote, local, direction, remote.gpu_memory());
  }
  copies_.push_back(std::move(copy));
  bytes_ += copies_.back().bytes;
  for (CopyProgress* progress : {sends, arrivals}) {
    if (progress == nullptr) continue;
    progress->copier.store(registry_.me(), std::memory_order_relaxed);
    progress->begun.fetch_add(1, std::memory_order_seq_cst);
  }
}

void GpuCopies::add_pieces(Copy& copy, Spans& from, Spans& to, CopyDirection direction,
                           std::uint32_t gpu_memory) const {
  const bool is_peer = !copy.target->is_own();
  const auto place = [&](std::uint64_t address, CopyDirection peers_end) {
    const bool is_peers = is_peer && direction == peers_end;
    if (is_gpu_address(address)) return is_peers ? Place::kPeerGpu : Place::kOwnGpu;
    return is_peers ? Place::kPeerHost : Place::kOwnHost;
  };
  for_each_pair(to, from, [&](std::byte* to_pointer, const std::byte* from_pointer, std::size_t bytes) {
    const auto to_address = reinterpret_cast<std::uintptr_t>(to_pointer);
    const auto from_address = reinterpret_cast<std::uintptr_t>(from_pointer);
    Piece piece{from_address, to_address, static_cast<std::uint32_t>(bytes),
                place(from_address, CopyDirection::kFromTarget), place(to_address, CopyDirection::kToTarget)};
    if (make_direct(*copy.target, direction, gpu_memory, piece)) {
      copy.pieces.push_back(std::move(piece));
      return;
    }
    for (std::size_t done = 0; done < bytes;) {
      const std::size_t part = std::min(bytes - done, kStagingBytes);
      copy.pieces.push_back(
          {from_address + done, to_address + done, static_cast<std::uint32_t>(part), piece.source, piece.target});
      done += part;
    }
  });
}

bool GpuCopies::make_direct(const ProcessView& target, CopyDirection direction, std::uint32_t gpu_memory,
                            Piece& piece) {
  if (!is_gpu_address(piece.from) || !is_gpu_address(piece.to)) return false;
  const bool is_write = direction == CopyDirection::kToTarget;
  const std::uint64_t local = is_write ? piece.from : piece.to;
  std::uint64_t remote = is_write ? piece.to : piece.from;
  const std::uint32_t gpu = gpu_of(local);
  if (target.is_own() && gpu_of(remote) == gpu) {
    remote = cuda_address(remote);
  } else {
    piece.reachable = find_reachable(target, gpu_memory, gpu);
    if (!piece.reachable || !piece.reachable->has(cuda_address(remote), piece.bytes)) return false;
    remote = piece.reachable->address(cuda_address(remote));
  }
  piece.from = is_write ? cuda_address(local) : remote;
  piece.to = is_write ? remote : cuda_address(local);
  piece.gpu = static_cast<std::int32_t>(gpu);
  return true;
}

void GpuCopies::advance() {
  watch_direct();
  writing_ = 0;
  is_held_ = false;
  lacks_buffer_ = false;
  bool has_failed = false;  // an earlier copy: the QP fails, and the later ones with it
  for (Copy& copy : copies_) {
    if (has_failed && copy.state == State::kRunning) copy.state = State::kTargetFailed;
    for (std::size_t i = copy.next; i < copy.pieces.size(); ++i) {
      Piece& piece = copy.pieces[i];
      advance(copy, piece);
      if (piece.stage == Stage::kDone && i == copy.next) ++copy.next;
      if (piece.stage == Stage::kWriting) writing_ = executor_of(piece);
      if (piece.stage < Stage::kWriting) is_held_ = true;
    }
    has_failed = has_failed || (copy.state != State::kRunning && copy.state != State::kDone);
    if (has_failed) is_held_ = true;
  }
  watch_direct();
  settle();
}

void GpuCopies::advance(Copy& copy, Piece& piece) {
  const bool has_failed = copy.state != State::kRunning;
  if (has_failed && (piece.stage == Stage::kWaiting || piece.stage == Stage::kRead)) {
    piece.stage = Stage::kDone;
  }
  if (piece.stage == Stage::kWaiting) piece.gpu != kStaged ? write_directly(copy, piece) : begin_read(copy, piece);
  // A piece is not asked for before an earlier one is in the same stage: it would have to wait for that one anyway.
  if (piece.stage == Stage::kReading && (!is_held_ || has_failed)) {
    finish_stage(copy, piece, piece.source, Stage::kRead, State::kSourceFailed);
  }
  if (piece.stage == Stage::kRead && copy.state == State::kRunning) begin_write(copy, piece);
  if (piece.stage == Stage::kWriting && piece.gpu != kStaged) {
    finish_direct(copy, piece);
  } else if (piece.stage == Stage::kWriting && writing_ == 0) {
    finish_stage(copy, piece, piece.target, Stage::kDone, State::kTargetFailed);
  }
  if (piece.stage != Stage::kDone) return;
  return_buffer(piece);
  piece.reachable.reset();
}

void GpuCopies::write_directly(Copy& copy, Piece& piece) {
  if (!may_write(piece)) return;
  Gpu* const gpu = Gpu::opened(static_cast<std::uint32_t>(piece.gpu));
  const bool is_queued =
      gpu != nullptr && !direct_.has_failed &&
      GpuTransfer::queue(*gpu, CopyWay::kOnDevice, lane_on(*gpu), [&](const cuda::Driver& cuda, cuda::Stream stream) {
        return cuda.copy_on_device(piece.to, piece.from, piece.bytes, stream);
      });
  if (!is_queued) {
    copy.state = State::kTargetFailed;
    piece.stage = Stage::kDone;
    return;
  }
  direct_.gpu = gpu;
  piece.number = ++direct_.queued;
  piece.stage = Stage::kWriting;
}

void GpuCopies::finish_direct(Copy& copy, Piece& piece) const {
  const bool has_ended = piece.number <= direct_.ended;
  if (!has_ended && !direct_.has_failed) return;
  piece.stage = Stage::kDone;
  if (!has_ended && copy.state == State::kRunning) copy.state = State::kTargetFailed;
}

void GpuCopies::watch_direct() {
  switch (direct_.watch.poll()) {
    case GpuTransfer::State::kRunning:
      return;
    case GpuTransfer::State::kDone:
      direct_.ended = direct_.watched;
      break;
    case GpuTransfer::State::kFailed:
      direct_.has_failed = true;
      return;
    case GpuTransfer::State::kNone:
      break;
  }
  if (direct_.ended == direct_.queued) return;
  if (direct_.watch.watch(*direct_.gpu, CopyWay::kOnDevice, lane_on(*direct_.gpu))) direct_.watched = direct_.queued;
}

bool GpuCopies::take_buffer(Copy& copy, Piece& piece) {
  if (piece.buffer) return true;
  if (buffers_ >= kMaxBuffers) return false;
  const bool needs_owner = piece.source == Place::kPeerGpu || piece.target == Place::kPeerGpu;
  piece.buffer = TakenBuffer::take(registry_, needs_owner ? copy.target->incarnation() : 0, is_waited_for_);
  if (!piece.buffer) {
    if (needs_owner && !copy.target->is_alive(monotonic_ns())) copy.state = State::kTargetDead;
    return false;
  }
  ++buffers_;
  return true;
}

void GpuCopies::return_buffer(Piece& piece) {
  if (!piece.buffer) return;
  piece.buffer = {};
  --buffers_;
}

void GpuCopies::begin_read(Copy& copy, Piece& piece) {
  // The oldest piece must not wait for buffers that later ones hold.
  lacks_buffer_ = lacks_buffer_ || !take_buffer(copy, piece);
  if (!lacks_buffer_) move(copy, piece, {piece.source, piece.from, true, State::kSourceFailed});
}

void GpuCopies::begin_write(Copy& copy, Piece& piece) {
  if (may_write(piece)) move(copy, piece, {piece.target, piece.to, false, State::kTargetFailed});
}

void GpuCopies::move(Copy& copy, Piece& piece, const End& end) {
  const Stage moving = end.is_read ? Stage::kReading : Stage::kWriting;
  const Stage moved = end.is_read ? Stage::kRead : Stage::kDone;
  std::byte* const buffer = piece.buffer.bytes();
  switch (end.place) {
    case Place::kOwnHost: {
      std::byte* const memory = pointer(end.address);
      end.is_read ? copy_in_order(buffer, memory, piece.bytes) : copy_in_order(memory, buffer, piece.bytes);
      piece.stage = moved;
      return;
    }
    case Place::kPeerHost: {
      Spans local;
      local.add(reinterpret_cast<std::uintptr_t>(buffer), piece.bytes);
      Spans peer;
      peer.add(end.address, piece.bytes);
      const CopyResult result = end.is_read ? copy_from(*copy.target, local, peer) : copy_to(*copy.target, local, peer);
      end_move(copy, piece, result, moved, end.failure);
      return;
    }
    case Place::kOwnGpu: {
      Gpu* const gpu = Gpu::opened(gpu_of(end.address));
      if (gpu == nullptr) return end_move(copy, piece, CopyResult::kFault, moved, end.failure);
      const CopyWay way = end.is_read ? CopyWay::kToHost : CopyWay::kFromHost;
      const std::uint64_t address = cuda_address(end.address);
      const bool is_queued =
          piece.transfer.start(*gpu, way, lane_on(*gpu), [&](const cuda::Driver& cuda, cuda::Stream stream) {
            return end.is_read ? cuda.copy_to_host(buffer, address, piece.bytes, stream)
                               : cuda.copy_to_device(address, buffer, piece.bytes, stream);
          });
      if (is_queued) piece.stage = moving;
      return;
    }
    case Place::kPeerGpu:
      if (piece.buffer.request_copy(*copy.target, end.address, piece.bytes, end.is_read, lane_at_peer()))
        piece.stage = moving;
      return;
  }
}

void GpuCopies::end_move(Copy& copy, Piece& piece, CopyResult result, Stage next, State failure) {
  piece.stage = result == CopyResult::kDone ? next : Stage::kDone;
  if (result != CopyResult::kDone && copy.state == State::kRunning) {
    copy.state = result == CopyResult::kProcessDead ? State::kTargetDead : failure;
  }
}

void GpuCopies::finish_stage(Copy& copy, Piece& piece, Place place, Stage next, State failure) {
  State result = State::kRunning;
  if (place == Place::kPeerGpu) {
    switch (piece.buffer.poll(*copy.target)) {
      case TakenBuffer::Progress::kRunning:
        return;
      case TakenBuffer::Progress::kDone:
        break;
      case TakenBuffer::Progress::kFailed:
        result = failure;
        break;
      case TakenBuffer::Progress::kOwnerDead:
        result = State::kTargetDead;
        break;
    }
  } else {
    const GpuTransfer::State state = piece.transfer.poll();
    if (state == GpuTransfer::State::kRunning) return;
    if (state == GpuTransfer::State::kFailed) result = failure;
  }
  piece.stage = result == State::kRunning ? next : Stage::kDone;
  if (result != State::kRunning && copy.state == State::kRunning) copy.state = result;
}

std::uint32_t GpuCopies::lane_on(Gpu& gpu) {
  if (!lane_) lane_ = gpu.take_lane();
  return *lane_;
}

std::uint32_t GpuCopies::lane_at_peer() {
  if (!lane_) {
    const auto first = static_cast<std::uint32_t>(registry_.me());  // another one in each process
    lane_ = first + g_next_lane_at_peers.fetch_add(1, std::memory_order_relaxed);
  }
  return *lane_;
}

GpuCopies::Executor GpuCopies::executor_of(const Piece& piece) {
  const auto stream = [&](std::uint32_t number, CopyWay way) {
    Gpu* const gpu = Gpu::opened(number);
    return gpu != nullptr ? reinterpret_cast<Executor>(gpu->stream(way, lane_on(*gpu))) : kThisThread;
  };
  if (piece.gpu != kStaged) return stream(static_cast<std::uint32_t>(piece.gpu), CopyWay::kOnDevice);
  if (piece.target == Place::kOwnGpu) return stream(gpu_of(piece.to), CopyWay::kFromHost);
  if (piece.target == Place::kPeerGpu) return kThisThread + 1 + gpu_of(piece.to);
  return kThisThread;
}

bool GpuCopies::may_write(const Piece& piece) {
  if (is_held_) return false;
  const Executor executor = executor_of(piece);
  return writing_ == 0 || (writing_ == executor && executor != kThisThread);
}

void GpuCopies::settle() {
  for (Copy& copy : copies_) {
    if (copy.has_settled) continue;
    if (copy.next != copy.pieces.size()) return;
    copy.has_settled = true;
    if (copy.state == State::kRunning) copy.state = State::kDone;
    for (CopyProgress* progress : {copy.sends, copy.arrivals}) {
      if (progress != nullptr) progress->settled.fetch_add(1, std::memory_order_release);
    }
  }
}

GpuCopies::State GpuCopies::oldest() const {
  return copies_.front().has_settled ? copies_.front().state : State::kRunning;
}

void GpuCopies::remove_oldest() {
  bytes_ -= copies_.front().bytes;
  copies_.pop_front();
}

void GpuCopies::cancel() {
  for (unsigned turn = 0; direct_.ended != direct_.queued && !direct_.has_failed; ++turn) {
    watch_direct();
    wait_a_little(turn);
  }
  for (Copy& copy : copies_) {
    if (copy.state == State::kRunning) copy.state = State::kTargetFailed;
    for (Piece& piece : copy.pieces) {
      for (unsigned turn = 0; piece.transfer.poll() == GpuTransfer::State::kRunning; ++turn) wait_a_little(turn);
      piece.stage = Stage::kDone;
      return_buffer(piece);
    }
    copy.next = copy.pieces.size();
  }
  settle();
  copies_.clear();
  bytes_ = 0;
  direct_.queued = direct_.watched = direct_.ended = 0;
  direct_.has_failed = false;
  direct_.watch.forget();
}

CopyResult copy_gpu_memory(const ProcessView& target, CopyDirection direction, Spans& local, Spans& remote) {
  std::optional<GpuCopies> copies;
  const bool is_begun = with_memory([&] {
    copies.emplace(target.registry(), true);
    copies->begin(target, direction, local, remote, nullptr, nullptr);
  });
  if (!is_begun) return CopyResult::kProcessDead;
  const std::uint64_t end = monotonic_ns() + kTimeoutNs;
  for (unsigned turn = 0;; ++turn) {
    copies->advance();
    switch (copies->oldest()) {
      case GpuCopies::State::kRunning:
        break;
      case GpuCopies::State::kDone:
        return CopyResult::kDone;
      case GpuCopies::State::kTargetDead:
        return CopyResult::kProcessDead;
      default:
        return CopyResult::kFault;
    }
    if (turn > kSpins && monotonic_ns() > end) return CopyResult::kProcessDead;
    wait_a_little(turn);
  }
}

}  // namespace verbatim::softverbs
