// Copies between GPU memory and other memory, of this process and of a peer. Each copy consists of pieces. A piece goes
// directly if one GPU reaches both ends, else through a staging buffer: it is read into the buffer and then written
// from there, by a GPU of this process, by this thread (host memory), or by the process that owns the GPU memory.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "softverbs/gpu/gpu.h"
#include "softverbs/gpu/imports.h"
#include "softverbs/gpu/staging.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"
#include "softverbs/memory/copy.h"
#include "softverbs/memory/spans.h"

namespace verbatim::softverbs {

// The copies that one QP has begun, oldest first. Bytes become visible in the order of the copies. Not thread-safe.
class GpuCopies {
 public:
  // `is_waited_for`: a thread that does nothing else waits for the end, so buffers are kept for it.
  GpuCopies(const HostRegistry& registry, bool is_waited_for)
      : registry_(registry), is_waited_for_(is_waited_for), lane_(is_waited_for ? std::optional(0U) : std::nullopt) {}
  // Waits until no copy accesses memory any more.
  ~GpuCopies();
  GpuCopies(const GpuCopies&) = delete;
  GpuCopies& operator=(const GpuCopies&) = delete;

  // Begins a copy of as many bytes as `local` has. `target`: the process of `remote`. `arrivals`: of the target's QP;
  // nullptr: nobody waits for the copy. Throws where memory runs out, and has changed nothing then.
  void begin(const ProcessView& target, CopyDirection direction, Spans& local, Spans& remote, CopyProgress* sends,
             CopyProgress* arrivals);
  // Moves every copy as far as it can go now. Never waits.
  void advance();

  bool empty() const { return copies_.empty(); }
  // Whether no copy accesses memory.
  bool has_settled() const { return copies_.empty() || copies_.back().has_settled; }
  std::size_t size() const { return copies_.size(); }
  std::uint64_t bytes() const { return bytes_; }

  enum class State { kRunning, kDone, kSourceFailed, kTargetFailed, kTargetDead };
  State oldest() const;
  void remove_oldest();
  // Begins nothing more, and waits until no copy accesses memory.
  void cancel();

 private:
  // Where a piece is read or written.
  enum class Place : std::uint8_t { kOwnHost, kOwnGpu, kPeerHost, kPeerGpu };
  enum class Stage : std::uint8_t { kWaiting, kReading, kRead, kWriting, kDone };

  struct Piece {
    std::uint64_t from;  // as in SharedMr; of a direct copy: addresses for its GPU
    std::uint64_t to;
    std::uint32_t bytes;
    Place source;
    Place target;
    // Of a direct copy: the GPU that executes it, and what keeps the memory reachable for it.
    std::int32_t gpu = kStaged;
    std::shared_ptr<const ReachableMemory> reachable{};
    std::uint64_t number = 0;  // among the direct copies, from 1
    Stage stage = Stage::kWaiting;
    TakenBuffer buffer{};
    GpuTransfer transfer{};
  };

  struct Copy {
    std::shared_ptr<const ProcessView> target;
    std::vector<Piece> pieces;
    std::size_t next = 0;  // the pieces before it are done
    std::uint64_t bytes = 0;
    State state = State::kRunning;
    bool has_settled = false;  // it accesses memory no more
    CopyProgress* sends = nullptr;
    CopyProgress* arrivals = nullptr;
  };

  // One end of a piece that passes through a buffer.
  struct End {
    Place place;
    std::uint64_t address;
    bool is_read;
    State failure;
  };

  // What executes the writes of a piece. Writes of one executor become visible in the order in which they were given to
  // it.
  using Executor = std::uintptr_t;

  static constexpr Executor kThisThread = 1;
  static constexpr std::int32_t kStaged = -1;

  void add_pieces(Copy& copy, Spans& from, Spans& to, CopyDirection direction, std::uint32_t gpu_memory) const;
  // Makes the piece a direct copy if the GPU at the local end reaches the other end.
  static bool make_direct(const ProcessView& target, CopyDirection direction, std::uint32_t gpu_memory, Piece& piece);
  void advance(Copy& copy, Piece& piece);
  bool take_buffer(Copy& copy, Piece& piece);  // false: none is free now
  void return_buffer(Piece& piece);
  void begin_read(Copy& copy, Piece& piece);
  void begin_write(Copy& copy, Piece& piece);
  // Begins to move the bytes between an end and the buffer; between host memories it also ends that.
  void move(Copy& copy, Piece& piece, const End& end);
  void write_directly(Copy& copy, Piece& piece);
  void finish_direct(Copy& copy, Piece& piece) const;
  void watch_direct();
  static void end_move(Copy& copy, Piece& piece, CopyResult result, Stage next, State failure);
  // Ends the stage of a piece when what it waits for is done.
  void finish_stage(Copy& copy, Piece& piece, Place place, Stage next, State failure);
  bool may_write(const Piece& piece);
  Executor executor_of(const Piece& piece);
  // All copies are of one lane, which shares the streams: so their order is kept without waiting.
  std::uint32_t lane_on(Gpu& gpu);
  std::uint32_t lane_at_peer();
  void settle();

  const HostRegistry& registry_;
  const bool is_waited_for_;
  std::optional<std::uint32_t> lane_;  // of a QP: taken at its first copy; all others share one
  std::deque<Copy> copies_;
  std::uint64_t bytes_ = 0;
  std::uint32_t buffers_ = 0;  // taken by the pieces

  // Direct copies under way are all in one stream. One event watches those that were queued when it was recorded: an
  // event for each costs as much as a copy.
  struct Direct {
    Gpu* gpu = nullptr;
    GpuTransfer watch;
    std::uint64_t queued = 0;   // numbers of the last one that was queued,
    std::uint64_t watched = 0;  // that `watch` waits for,
    std::uint64_t ended = 0;    // and that has ended
    bool has_failed = false;    // then nothing is known of those after `ended`, and none of them runs
  };
  Direct direct_;

  // While advance() goes through the pieces: the executor of the writes under way among the earlier pieces, 0: none;
  // and whether one of them is not written yet, so that no later one may be.
  Executor writing_ = 0;
  bool is_held_ = false;
  bool lacks_buffer_ = false;  // an earlier piece got no buffer
};

// Executes one copy and waits for its end. kProcessDead: also where memory runs out.
CopyResult copy_gpu_memory(const ProcessView& target, CopyDirection direction, Spans& local, Spans& remote);

}  // namespace verbatim::softverbs
