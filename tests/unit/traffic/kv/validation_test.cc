// Every kind of nonsense has its own code, and its text has the values that do not go together.
#include "traffic/kv/validation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/clock.h"
#include "traffic/kv/ladder.h"

namespace verbatim::kv {
namespace {

class Validation : public testing::Test {
 protected:
  Validation() {
    family_.geometry = shared_by(find_model("llama-70b-tp1").kv, 2);
    family_.num_blocks = 512;
    family_.block_len = family_.geometry.part_bytes();
    for (std::uint64_t layer = 0; layer < 80; ++layer) {
      family_.bases.push_back(0x10'0000'0000 + layer * family_.layer_bytes());
    }
    memory_.add(family_.bases[0], family_.bytes());
  }

  void expect(RefusalCode code, const std::optional<Refusal>& refusal, const std::vector<std::string>& values) {
    ASSERT_TRUE(refusal);
    EXPECT_STREQ(refusal_name(code), refusal_name(refusal->code)) << refusal->text;
    for (const std::string& value : values) {
      EXPECT_NE(std::string::npos, refusal->text.find(value)) << value << " in: " << refusal->text;
    }
  }
  std::optional<Refusal> check(const BlockList& list, std::size_t count = 3) {
    return validate_list({family_, memory_}, list, count);
  }

  Family family_;
  IntervalSet memory_;
  Geometry indexer_ = indexer_geometry();
};

TEST_F(Validation, OfAGoodListPasses) {
  EXPECT_FALSE(validate_family({family_, memory_}));
  EXPECT_FALSE(check(make_list(family_, {0, 511, 7})));
}

TEST_F(Validation, OfAnotherFamilysHandle) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.family = FamilyId::kLf;
  expect(RefusalCode::kWrongFamily, check(list), {"family 1", "family 0", "kv"});
}

TEST_F(Validation, OfAHandleForAnotherShape) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.geometry_hash = 0xabcd;
  expect(RefusalCode::kGeometryMismatch, check(list), {"000000000000abcd"});
}

TEST_F(Validation, OfAnIndexAtTheEnd) {
  expect(RefusalCode::kIndexOutOfRange, check(make_list(family_, {1, 512, 3})),
         {"block 512", "position 1", "512 blocks"});
}

TEST_F(Validation, OfCounts) {
  expect(RefusalCode::kCountMismatch, check(make_list(family_, {1, 2})), {"2 blocks", "3"});
  expect(RefusalCode::kCountMismatch, check(make_list(family_, {}), 0), {"0 blocks"});
  expect(RefusalCode::kCountMismatch, validate_pair(make_list(family_, {1}), make_list(family_, {1, 2})),
         {"1 source", "2 destination"});
}

TEST_F(Validation, OfLengths) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.piece_bytes = 8192;
  expect(RefusalCode::kLengthMismatch, check(list), {"8192", "16384"});
  expect(RefusalCode::kLengthMismatch, validate_pair(make_list(family_, {1, 2, 3}), list), {"8192", "16384"});
}

TEST_F(Validation, OfTheSameBaseWithAnotherBlockLength) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.block_len = 32768;
  expect(RefusalCode::kBaseConflict, check(list), {"32768", "16384", "0x1000000000"});
}

TEST_F(Validation, OfAnAddressThatNobodyRegistered) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.bases[40] += std::uint64_t{1} << 40;
  expect(RefusalCode::kUnregistered, check(list), {"layer 40", "0x11"});
  memory_ = {};
  memory_.add(family_.bases[0], family_.bytes() - 1);
  expect(RefusalCode::kUnregistered, validate_family({family_, memory_}), {"layer 79"});
}

TEST_F(Validation, OfAnOverflow) {
  family_.num_blocks = std::size_t{1} << 60;
  expect(RefusalCode::kGeometryMismatch, validate_family({family_, memory_}), {"overflow"});
}

TEST_F(Validation, OfPairsOfDifferentFamilies) {
  const BlockList kv = make_list(family_, {1});
  BlockList lf = kv;
  lf.family = FamilyId::kLf;
  expect(RefusalCode::kWrongFamily, validate_pair(kv, lf), {"0", "1"});
  BlockList other = kv;
  other.geometry_hash = 1;
  expect(RefusalCode::kGeometryMismatch, validate_pair(kv, other), {});
}

TEST_F(Validation, OfABlockThatIsWrittenTwice) {
  Claims claims(512);
  const std::vector<std::uint32_t> twice{4, 9, 4};
  expect(RefusalCode::kOverlappingDestination, claims.claim(1, twice), {"block 4", "position 0", "position 2"});
  const std::vector<std::uint32_t> once{4, 9};
  EXPECT_FALSE(claims.claim(7, once)) << "a refused list has claimed nothing";
  const std::vector<std::uint32_t> others{3, 9};
  expect(RefusalCode::kOverlappingDestination, claims.claim(8, others), {"block 9", "position 1", "request 7"});
  claims.release(once);
  EXPECT_FALSE(claims.claim(8, others));
  const std::vector<std::uint32_t> beyond{512};
  expect(RefusalCode::kIndexOutOfRange, claims.claim(9, beyond), {"512"});
}

TEST_F(Validation, TakesTimeInProportion) {
  family_.num_blocks = 1 << 20;
  Claims claims(family_.num_blocks);
  const auto best_ns = [&](std::size_t count) {
    std::vector<std::uint32_t> blocks(count);
    std::iota(blocks.begin(), blocks.end(), 0U);
    const BlockList list = make_list(family_, blocks);
    std::uint64_t best = ~std::uint64_t{0};
    for (int i = 0; i < 20; ++i) {
      const std::uint64_t begin = monotonic_ns();
      EXPECT_FALSE(check(list, count));
      EXPECT_FALSE(claims.claim(1, list.blocks));
      best = std::min(best, monotonic_ns() - begin);
      claims.release(list.blocks);
    }
    return static_cast<double>(best);
  };
  EXPECT_LT(best_ns(400'000) / best_ns(100'000), 4 * 2.5);  // a quadratic one would take 16 times as long
}

TEST(Ladder, EndsAfterEachRung) {
  EXPECT_EQ(Rung::kFresh, next_rung(Rung::kDirect, true));
  EXPECT_EQ(Rung::kStaged, next_rung(Rung::kDirect, false));
  EXPECT_EQ(Rung::kStaged, next_rung(Rung::kFresh, true));
  EXPECT_EQ(Rung::kRecompute, next_rung(Rung::kStaged, true));
  EXPECT_EQ(Rung::kRecompute, next_rung(Rung::kRecompute, true));
}

}  // namespace
}  // namespace verbatim::kv
