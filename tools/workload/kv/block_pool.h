// The blocks of one family on one rank: which are free, and how scattered those are that a request gets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace verbatim::kv {

class BlockPool {
 public:
  // Blocks below `reserved` are never given out. `fragmentation` from 0 (a request's blocks are one run where there is
  // one) to 1 (no two of them are neighbours).
  BlockPool(std::size_t blocks, std::size_t reserved, double fragmentation, std::uint64_t seed);

  std::size_t free_blocks() const { return free_.size(); }
  bool is_free(std::uint32_t block) const { return place_[block] != kTaken; }

  // `count` free blocks, in the order in which a request uses them; empty when there are not so many.
  std::vector<std::uint32_t> take(std::size_t count);
  void give_back(const std::vector<std::uint32_t>& blocks);

 private:
  static constexpr std::size_t kTaken = ~std::size_t{0};

  std::uint32_t pick_first(std::size_t count);
  std::uint32_t pick_after(std::uint32_t previous);
  std::uint32_t pick_anywhere();
  void remove(std::uint32_t block);

  const double fragmentation_;
  std::mt19937_64 random_;
  std::vector<std::uint32_t> free_;
  std::vector<std::size_t> place_;  // of a block in free_, or kTaken
};

}  // namespace verbatim::kv
