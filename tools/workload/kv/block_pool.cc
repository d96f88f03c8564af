#include "workload/kv/block_pool.h"

namespace verbatim::kv {
namespace {

// Attempts to pick a free block that is not the next one. A nearly empty pool may have no such block.
constexpr int kTries = 16;

}  // namespace

BlockPool::BlockPool(std::size_t blocks, std::size_t reserved, double fragmentation, std::uint64_t seed)
    : fragmentation_(fragmentation), random_(seed), index_(blocks, kInUse) {
  for (std::size_t block = reserved; block < blocks; ++block) {
    index_[block] = free_.size();
    free_.push_back(static_cast<std::uint32_t>(block));
  }
}

std::vector<std::uint32_t> BlockPool::take(std::size_t count) {
  std::vector<std::uint32_t> picked;
  if (count > free_.size()) return picked;
  picked.reserve(count);
  while (picked.size() < count) {
    const std::uint32_t block = picked.empty() ? pick_first(count) : pick_after(picked.back());
    remove(block);
    picked.push_back(block);
  }
  return picked;
}

void BlockPool::give_back(const std::vector<std::uint32_t>& blocks) {
  for (const std::uint32_t block : blocks) {
    index_[block] = free_.size();
    free_.push_back(block);
  }
}

// The first block of a request. Without fragmentation this is the start of the first free run of `count` blocks.
std::uint32_t BlockPool::pick_first(std::size_t count) {
  if (fragmentation_ > 0) return pick_anywhere();
  std::size_t run = 0;
  for (std::size_t block = 0; block < index_.size(); ++block) {
    run = index_[block] == kInUse ? 0 : run + 1;
    if (run == count) return static_cast<std::uint32_t>(block + 1 - count);
  }
  return pick_anywhere();
}

std::uint32_t BlockPool::pick_after(std::uint32_t previous) {
  const bool breaks = std::uniform_real_distribution<double>(0, 1)(random_) < fragmentation_;
  const std::size_t next = std::size_t{previous} + 1;
  const bool has_next = next < index_.size() && index_[next] != kInUse;
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
  const std::size_t index = index_[block];
  const std::uint32_t last = free_.back();
  free_[index] = last;
  index_[last] = index;
  free_.pop_back();
  index_[block] = kInUse;
}

}  // namespace verbatim::kv
