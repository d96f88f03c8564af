#include "base/random.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace verbatim {
namespace {

TEST(FillRandom, Buffer_IsFilledDifferentlyEachTime) {
  // Each byte must differ from 0 at least once in 64 fills. A good generator fails this with probability 2^-502.
  std::vector<std::byte> seen(1000);
  std::vector<std::byte> bytes(1000);
  for (int round = 0; round < 64; ++round) {
    const std::vector<std::byte> before = bytes;
    ASSERT_TRUE(fill_random(bytes));
    EXPECT_NE(before, bytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) seen[i] |= bytes[i];
  }
  for (const std::byte byte : seen) EXPECT_NE(byte, std::byte{0});
}

TEST(FillRandom, Span_LeavesNeighbouringBytesUnchanged) {
  std::array<std::byte, 48> bytes{};
  ASSERT_TRUE(fill_random(std::span(bytes).subspan(16, 16)));
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(bytes[i], std::byte{0});
    EXPECT_EQ(bytes[i + 32], std::byte{0});
  }
}

TEST(FillRandom, EmptySpan_Succeeds) {
  EXPECT_TRUE(fill_random({}));
}

}  // namespace
}  // namespace verbatim
