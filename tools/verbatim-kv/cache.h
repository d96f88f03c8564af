// The cache memory of one rank and what is in it: canaries in blocks that belong to nobody, in the others bytes that
// depend on request, family, layer, entry, block and offset, so that whatever goes astray shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "workload/content.h"
#include "workload/guarded_buffer.h"
#include "workload/kv/family.h"
#include "workload/kv/intervals.h"

namespace verbatim::kv {

// Whether all families lie in one piece of memory, layer by layer, or each family or each layer has its own.
enum class Allocations : std::uint8_t { kSlab, kFamily, kLayer };

class CacheMemory {
 public:
  // Gives the families their addresses.
  CacheMemory(std::vector<Family>& families, Allocations allocations);

  std::size_t allocations() const { return buffers_.size(); }
  // The layers of all families, as far as they touch each other in one piece: what is to be registered.
  const IntervalSet& intervals() const { return intervals_; }
  // Bytes written outside of the allocations.
  std::uint64_t damage() const;

 private:
  std::vector<std::unique_ptr<workload::GuardedBuffer>> buffers_;
  IntervalSet intervals_;
};

// Where in the family's blocks a message of a request lies: layers first, then entries, then blocks.
struct MessagePosition {
  std::uint32_t layer;
  std::uint32_t entry;
  std::uint32_t position;  // in the request's list
};
inline MessagePosition place_of(const Geometry& geometry, std::size_t blocks, std::size_t message) {
  const auto plane = static_cast<std::uint32_t>(message / blocks);
  return {plane / geometry.entries, plane % geometry.entries, static_cast<std::uint32_t>(message % blocks)};
}

// The blocks of one request on one rank.
struct BlockShare {
  std::uint32_t request;
  std::size_t first;        // index in the request of the first block of the list
  std::size_t part_offset;  // where in a prefill block the rank's part begins
  std::span<const std::uint32_t> blocks;
};

// Fills and checks the blocks of one family on one rank.
class Contents {
 public:
  explicit Contents(const Family& family) : family_(family) {}

  void set_canaries(std::span<const std::uint32_t> blocks) const;
  void fill(const BlockShare& share) const;
  void poison(const BlockShare& share) const;
  // Wrong bytes; the first place goes to `where`.
  std::uint64_t check_canaries(std::span<const std::uint32_t> blocks, std::string& where) const;
  std::uint64_t check(const BlockShare& share, std::string& where) const;

 private:
  template <typename Visit>
  void each(std::span<const std::uint32_t> blocks, Visit visit) const;
  workload::Pattern canary(std::uint32_t layer, std::uint32_t entry, std::uint32_t block) const;
  workload::Pattern content(const BlockShare& share, const MessagePosition& place) const;
  std::string describe(const MessagePosition& place, std::uint32_t block, const workload::Mismatch& found) const;

  const Family& family_;
};

}  // namespace verbatim::kv
