// The free blocks of one family on one rank. A setting decides how scattered the blocks of one request are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace verbatim::kv {

class BlockPool {
 public:
  // Blocks below `reserved` are never given out. `fragmentation` goes from 0 (a request's blocks are one run where
  // there is a free run of that length) to 1 (no two of them are adjacent).
  BlockPool(std::size_t blocks, std::size_t reserved, double fragmentation, std::uint64_t seed);

  std::size_t free_blocks() const { return free_.size(); }
  bool is_free(std::uint32_t block) const { return index_[block] != kInUse; }

  // Returns `count` free blocks in the order in which a request uses them, or an empty list when fewer are free.
  std::vector<std::uint32_t> take(std::size_t count);
  void give_back(const std::vector<std::uint32_t>& blocks);

 private:
  static constexpr std::size_t kInUse = ~std::size_t{0};

  std::uint32_t pick_first(std::size_t count);
  std::uint32_t pick_after(std::uint32_t previous);
  std::uint32_t pick_anywhere();
  void remove(std::uint32_t block);

  const double fragmentation_;
  std::mt19937_64 random_;
  std::vector<std::uint32_t> free_;
  std::vector<std::size_t> index_;  // by block: its index in free_, or kInUse
};

}  // namespace verbatim::kv
