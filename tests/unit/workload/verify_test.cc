// Comparison of received bytes with the expected content: every kind of damage is found and counted.
#include "workload/verify.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace verbatim::workload {
namespace {

constexpr std::size_t kBytes = 10'007;  // several blocks, and a size that is not a multiple of 8

class Verify : public testing::Test {
 protected:
  Verify() : data_(kBytes) { fill(pattern_, data_.data(), kBytes); }
  Mismatch check(std::size_t unit = 1) { return verify(pattern_, data_.data(), kBytes, 0, unit); }

  Pattern pattern_{1, 2};
  std::vector<std::uint8_t> data_;
};

TEST_F(Verify, FilledBuffer_IsAccepted) {
  EXPECT_EQ(0U, check().wrong);
}

TEST_F(Verify, PartAtItsOffset_IsAccepted) {
  EXPECT_EQ(0U, verify(pattern_, data_.data() + 4'099, 5'000, 4'099).wrong);
  EXPECT_NE(0U, verify(pattern_, data_.data() + 4'099, 5'000, 4'100).wrong);
}

TEST_F(Verify, OneFlippedBit_IsFound) {
  for (std::size_t at = 0; at < kBytes; ++at) {
    const auto bit = static_cast<std::uint8_t>(1U << (at % 8));
    data_[at] ^= bit;
    const Mismatch found = check();
    ASSERT_EQ(1U, found.wrong);
    ASSERT_EQ(at, found.first_offset);
    ASSERT_EQ(data_[at], found.got);
    ASSERT_EQ(data_[at] ^ bit, found.expected);
    data_[at] ^= bit;
  }
}

TEST_F(Verify, SwappedBlocks_AreFound) {
  for (const std::size_t block : {8UL, 64UL, 512UL, 4'096UL}) {
    std::swap_ranges(data_.begin(), data_.begin() + static_cast<std::ptrdiff_t>(block),
                     data_.begin() + static_cast<std::ptrdiff_t>(block));
    const Mismatch found = check();
    EXPECT_GT(found.wrong, block);  // nearly all of 2 * block
    EXPECT_LT(found.first_offset, 4U);
    fill(pattern_, data_.data(), kBytes);
  }
}

TEST_F(Verify, ShiftByOneByte_IsFound) {
  std::memmove(data_.data(), data_.data() + 1, kBytes - 1);
  EXPECT_GT(check().wrong, kBytes * 9 / 10);
}

TEST_F(Verify, OtherStepOrSource_IsFound) {
  EXPECT_GT(verify(Pattern(1, 3), data_.data(), kBytes).wrong, kBytes * 9 / 10);
  EXPECT_GT(verify(Pattern(2, 2), data_.data(), kBytes).wrong, kBytes * 9 / 10);
}

TEST_F(Verify, SkippedBytesOfPoisonedBuffer_AreFound) {
  for (const std::size_t skipped : {1UL, 7UL, 4'096UL, kBytes}) {
    poison(pattern_, data_.data(), kBytes);
    fill(pattern_, data_.data(), kBytes - skipped);
    const Mismatch found = check();
    EXPECT_EQ(skipped, found.wrong);
    EXPECT_EQ(kBytes - skipped, found.first_offset);
  }
}

TEST_F(Verify, SeveralWrongBytes_AreCountedInUnits) {
  data_[8] ^= 1;
  data_[9] ^= 1;
  data_[12] ^= 1;
  data_[kBytes - 1] ^= 1;
  EXPECT_EQ(4U, check(1).wrong);
  EXPECT_EQ(3U, check(4).wrong);
  EXPECT_EQ(8U, check(4).first_offset);
}

}  // namespace
}  // namespace verbatim::workload
