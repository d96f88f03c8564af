#include "workload/kv/block_pool.h"

namespace verbatim::kv {
namespace {

// Tries to find a block that is no neighbour; in a pool that is nearly empty there may be none.
constexpr int kTries = 16;

}  // namespace

BlockPool::BlockPool(std::size_t blocks, std::size_t reserved, double fragmentation, std::uint64_t seed)
    : fragmentation_(fragmentation), random_(seed), place_(blocks, kTaken) {
  for (std::size_t block = reserved; block < blocks; ++block) {
    place_[block] = free_.size();
    free_.push_back(static_cast<std::uint32_t>(block));
  }
}

std::vector<std::uint32_t> BlockPool::take(std::size_t count) {
  std::vector<std::uint32_t> taken;
  if (count > free_.size()) return taken;
  taken.reserve(count);
  while (taken.size() < count) {
    const std::uint32_t block = taken.empty() ? pick_first(count) : pick_after(taken.back());
    remove(block);
    taken.push_back(block);
  }
  return taken;
}

void BlockPool::give_back(const std::vector<std::uint32_t>& blocks) {
  for (const std::uint32_t block : blocks) {
    place_[block] = free_.size();
    free_.push_back(block);
  }
}

// Where a run may begin: without fragmentation, the first hole that is long enough.
std::uint32_t BlockPool::pick_first(std::size_t count) {
  if (fragmentation_ > 0) return pick_anywhere();
  std::size_t run = 0;
  for (std::size_t block = 0; block < place_.size(); ++block) {
    run = place_[block] == kTaken ? 0 : run + 1;
    if (run == count) return static_cast<std::uint32_t>(block + 1 - count);
  }
  return pick_anywhere();
}

std::uint32_t BlockPool::pick_after(std::uint32_t previous) {
  const bool breaks = std::uniform_real_distribution<double>(0, 1)(random_) < fragmentation_;
  const std::size_t next = std::size_t{previous} + 1;
  const bool has_next = next < place_.size() && place_[next] != kTaken;
  if (!breaks && has_next) return static_cast<std::uint32_t>(next);
  for (int i = 0; i < kTries; ++i) {
    const std::uint32_t block = pick_anywhere();
    if (block != next) return block;
  }
  return pick_anywhere();
}

std::uint32_t BlockPool::pick_anywhere() {
  return free_[std::uniform_int_distribution<std::size_t>(0, free_.size() - 1)(random_)];
}

void BlockPool::remove(std::uint32_t block) {
  const std::size_t place = place_[block];
  const std::uint32_t last = free_.back();
  free_[place] = last;
  place_[last] = place;
  free_.pop_back();
  place_[block] = kTaken;
}

}  // namespace verbatim::kv
