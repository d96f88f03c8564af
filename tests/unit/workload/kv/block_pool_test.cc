// The block pool: it gives each block to one request only, and fragments as configured.
#include "workload/kv/block_pool.h"

#include <gtest/gtest.h>

#include <set>

namespace verbatim::kv {
namespace {

std::size_t neighbours(const std::vector<std::uint32_t>& blocks) {
  std::size_t count = 0;
  for (std::size_t i = 1; i < blocks.size(); ++i) count += blocks[i] == blocks[i - 1] + 1 ? 1U : 0U;
  return count;
}

TEST(BlockPool, AnyFragmentation_GivesEachBlockOnce) {
  for (const double fragmentation : {0.0, 0.5, 1.0}) {
    BlockPool pool(100, 20, fragmentation, 1);
    std::set<std::uint32_t> seen;
    for (int request = 0; request < 8; ++request) {
      for (const std::uint32_t block : pool.take(10)) {
        EXPECT_LE(20U, block);
        EXPECT_GT(100U, block);
        EXPECT_FALSE(pool.is_free(block));
        EXPECT_TRUE(seen.insert(block).second) << block;
      }
    }
    EXPECT_EQ(80U, seen.size());
    EXPECT_TRUE(pool.take(1).empty());
  }
}

TEST(BlockPool, NoFragmentation_GivesOneContiguousRun) {
  BlockPool pool(1000, 0, 0, 7);
  std::vector<std::vector<std::uint32_t>> allocated;
  for (int request = 0; request < 10; ++request) allocated.push_back(pool.take(100));
  for (const auto& blocks : allocated) EXPECT_EQ(99U, neighbours(blocks));
  pool.give_back(allocated[3]);
  pool.give_back(allocated[4]);
  EXPECT_EQ(199U, neighbours(pool.take(200)));
}

TEST(BlockPool, Fragmentation_DeterminesNeighbours) {
  BlockPool scattered(4000, 0, 1, 7);
  EXPECT_EQ(0U, neighbours(scattered.take(500)));
  BlockPool half(100'000, 0, 0.5, 7);
  EXPECT_NEAR(500, static_cast<double>(neighbours(half.take(1000))), 100);
}

TEST(BlockPool, TooManyBlocks_AreRejected) {
  BlockPool pool(10, 0, 1, 7);
  EXPECT_TRUE(pool.take(11).empty());
  EXPECT_EQ(10U, pool.free_blocks());
  EXPECT_EQ(10U, pool.take(10).size());
}

}  // namespace
}  // namespace verbatim::kv
