// Sets of registered address intervals: merging and look-up.
#include "workload/kv/intervals.h"

#include <gtest/gtest.h>

namespace verbatim::kv {
namespace {

using Intervals = std::vector<Interval>;

TEST(Intervals, AdjacentIntervals_AreMerged) {
  IntervalSet set;
  for (std::uint64_t layer = 0; layer < 61; ++layer) {
    EXPECT_TRUE(set.add(0x10000 + layer * 800, 700));        // a layer of the first family
    EXPECT_TRUE(set.add(0x10000 + layer * 800 + 700, 100));  // a layer of the second family
  }
  EXPECT_EQ((Intervals{{0x10000, 0x10000 + 61 * 800}}), set.all());
}

TEST(Intervals, SeparateIntervals_StaySeparate) {
  IntervalSet set;
  set.add(300, 10);
  set.add(100, 10);
  set.add(200, 10);
  EXPECT_EQ((Intervals{{100, 110}, {200, 210}, {300, 310}}), set.all());
  set.add(105, 200);
  EXPECT_EQ((Intervals{{100, 310}}), set.all());
}

TEST(Intervals, SameBaseOtherLength_IsExtended) {
  IntervalSet set;
  set.add(1000, 4096);
  EXPECT_FALSE(set.find(1000, 8192));
  set.add(1000, 8192);
  EXPECT_EQ((Intervals{{1000, 9192}}), set.all());
  EXPECT_TRUE(set.find(1000, 4096));
  EXPECT_TRUE(set.find(1000, 8192));
  set.add(1000, 16);
  EXPECT_EQ((Intervals{{1000, 9192}}), set.all());
}

TEST(Intervals, OnlyContainedRange_IsFound) {
  IntervalSet set;
  set.add(100, 10);
  set.add(200, 10);
  EXPECT_EQ(0U, *set.find(100, 10));
  EXPECT_EQ(1U, *set.find(209, 1));
  EXPECT_FALSE(set.find(99, 2));
  EXPECT_FALSE(set.find(109, 2));
  EXPECT_FALSE(set.find(150, 1));
  EXPECT_FALSE(set.find(105, 100));
  EXPECT_FALSE(set.find(205, ~std::uint64_t{0}));
}

TEST(Intervals, WrappingRange_IsRejected) {
  IntervalSet set;
  EXPECT_FALSE(set.add(~std::uint64_t{0} - 10, 20));
  EXPECT_TRUE(set.all().empty());
}

}  // namespace
}  // namespace verbatim::kv
