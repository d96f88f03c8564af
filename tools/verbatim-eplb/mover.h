// Rearranges one rank's experts, layer by layer: owns the memory, adds addresses to the calls, packs and unpacks, and
// checks every byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "verbatim-eplb/content.h"
#include "verbatim-eplb/injection.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/posting.h"
#include "verbatim-eplb/rows.h"
#include "verbatim-eplb/transport.h"

namespace verbatim::eplb {

// What one rank needs to rearrange one layer.
struct LayerWork {
  std::size_t index;
  const Layer& layer;
  const LayerPlan& plan;
  const RankPlan& own;
  const std::vector<CallGroup>& groups;
};

class Mover {
 public:
  Mover(const Options& options, const Input& input, const Injection& injection, Transport& transport,
        Watchdog& watchdog);

  // The memory to register. Part::piece is an index into this list.
  std::vector<ranks::Piece> pieces() const;

  // Writes the old experts, poison and guards, as they must be before a layer.
  void prepare(const LayerWork& work, std::uint64_t iteration);
  // Packs, runs the calls, unpacks, and copies new rows to their final place.
  void run(const LayerWork& work);
  // Compares all memory with what it must contain after prepare() and run().
  Damage check(const LayerWork& work, std::uint64_t iteration);

  std::uint64_t packs() const { return packs_; }
  // Bytes allocated for each buffer, without guards.
  struct Buffers {
    std::size_t weights = 0;
    std::size_t new_rows = 0;
    std::size_t send = 0;
    std::size_t recv = 0;
  };
  const Buffers& buffers() const { return buffers_; }

 private:
  enum PieceIndex : std::size_t { kWeights, kNewRows = kTargetPiece, kSend, kRecv };

  bool injects(Inject kind, const LayerWork& work) const {
    return injection_.is(kind, work.index, static_cast<std::size_t>(options_.job.rank));
  }
  std::vector<Operation> address(const LayerWork& work) const;
  std::vector<Part> parts_of_rows(const Rows& rows, PieceIndex piece, std::uint32_t row, std::uint32_t tensor) const;
  void pack(const LayerWork& work);
  void carry(const LayerWork& work, const std::vector<Operation>& operations);
  void unpack(const LayerWork& work);
  void copy_local(const LayerWork& work);
  void move_from_buffer(const LayerWork& work);
  void copy_row(const Rows& to, std::size_t to_row, const Rows& from, std::size_t from_row);
  void flip(std::byte* at);
  // The content of `row` when it holds `expert`; poison for kEmptyRow.
  workload::Pattern content(const LayerWork& work, std::uint64_t iteration, int expert, std::size_t row,
                            std::size_t tensor) const;

  const Options& options_;
  const Input& input_;
  const Injection& injection_;
  Transport& transport_;
  Watchdog& watchdog_;
  Memory& memory_;
  const Contents contents_;
  const std::size_t local_rows_;
  const std::vector<std::size_t> offsets_;
  Rows weights_;
  Rows new_rows_;
  std::optional<PackedBuffer> send_;
  std::optional<PackedBuffer> recv_;
  Buffers buffers_;
  std::uint64_t packs_ = 0;
  std::uint64_t random_;
};

}  // namespace verbatim::eplb
