// The cache memory of one rank and its content: canaries in free blocks, and in the others bytes that depend on
// request, family, layer, entry, block and offset, so that misplaced data is found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "memory/guarded_buffer.h"
#include "memory/memory.h"
#include "workload/content.h"
#include "workload/kv/family.h"
#include "workload/kv/intervals.h"
#include "workload/verify.h"

namespace verbatim::kv {

// kSlab: one allocation for all families, layer by layer. kFamily, kLayer: one allocation for each family or layer.
enum class Allocations : std::uint8_t { kSlab, kFamily, kLayer };

class CacheMemory {
 public:
  // Allocates in `memory` and assigns addresses to the families.
  CacheMemory(memory::Memory& memory, std::vector<Family>& families, Allocations allocations);

  std::size_t allocations() const { return buffers_.size(); }
  // The memory to register: the layers of all families, merged where they are adjacent in one allocation.
  const IntervalSet& intervals() const { return intervals_; }
  // Bytes written outside of the allocations.
  std::uint64_t damage() const;

 private:
  std::vector<std::unique_ptr<memory::GuardedBuffer>> buffers_;
  IntervalSet intervals_;
};

// The position of a message of a request in the family's blocks. Messages are ordered by layer, entry, block.
struct MessagePosition {
  std::uint32_t layer;
  std::uint32_t entry;
  std::uint32_t position;  // index in the request's block list
};
inline MessagePosition position_of(const Geometry& geometry, std::size_t blocks, std::size_t message) {
  const auto plane = static_cast<std::uint32_t>(message / blocks);
  return {plane / geometry.entries, plane % geometry.entries, static_cast<std::uint32_t>(message % blocks)};
}

// The blocks of one request on one rank.
struct BlockShare {
  std::uint32_t request;
  std::size_t first;        // index of the list's first block among the request's blocks
  std::size_t part_offset;  // offset of the rank's part in a prefill block
  std::span<const std::uint32_t> blocks;
};

// Fills and checks the blocks of one family on one rank.
class Contents {
 public:
  Contents(memory::Memory& memory, const Family& family) : memory_(memory), family_(family) {}

  void set_canaries(std::span<const std::uint32_t> blocks) const;
  void fill(const BlockShare& share) const;
  void poison(const BlockShare& share) const;
  // Return the number of wrong bytes, and describe the first in `where`.
  std::uint64_t check_canaries(std::span<const std::uint32_t> blocks, std::string& where) const;
  std::uint64_t check(const BlockShare& share, std::string& where) const;

  // Work that belongs to the checks, too.
  template <typename Work>
  void timed(const Work& work) const {
    const std::uint64_t begin = monotonic_ns();
    work();
    spent_ns_ += monotonic_ns() - begin;
  }
  // The time that all of this has taken since forget_time(). Used by one thread, like all of this class.
  std::uint64_t spent_ns() const { return spent_ns_; }
  void forget_time() const { spent_ns_ = 0; }

 private:
  template <typename Visit>
  void each(std::span<const std::uint32_t> blocks, Visit visit) const;
  workload::Pattern canary(std::uint32_t layer, std::uint32_t entry, std::uint32_t block) const;
  workload::Pattern content(const BlockShare& share, const MessagePosition& place) const;
  std::string describe(const MessagePosition& place, std::uint32_t block, const workload::Mismatch& found) const;

  memory::Memory& memory_;
  const Family& family_;
  mutable std::uint64_t spent_ns_ = 0;
};

}  // namespace verbatim::kv
