// Validation of block lists: every kind of error has its own rejection code, and the text contains the values that do
// not match.
#include "workload/kv/validation.h"

#include <gtest/gtest.h>

#include <numeric>

#include "workload/kv/fallback.h"

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

  void expect(RejectionCode code, const std::optional<Rejection>& rejection, const std::vector<std::string>& values) {
    ASSERT_TRUE(rejection);
    EXPECT_STREQ(rejection_name(code), rejection_name(rejection->code)) << rejection->text;
    for (const std::string& value : values) {
      EXPECT_NE(std::string::npos, rejection->text.find(value)) << value << " in: " << rejection->text;
    }
  }
  std::optional<Rejection> check(const BlockList& list, std::size_t count = 3) {
    return validate_list({family_, memory_}, list, count);
  }

  Family family_;
  IntervalSet memory_;
  Geometry indexer_ = indexer_geometry();
};

TEST_F(Validation, ValidList_IsAccepted) {
  EXPECT_FALSE(validate_family({family_, memory_}));
  EXPECT_FALSE(check(make_list(family_, {0, 511, 7})));
}

TEST_F(Validation, HandleOfOtherFamily_IsRejected) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.family = FamilyId::kLf;
  expect(RejectionCode::kWrongFamily, check(list), {"family 1", "family 0", "kv"});
}

TEST_F(Validation, HandleOfOtherGeometry_IsRejected) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.geometry_hash = 0xabcd;
  expect(RejectionCode::kGeometryMismatch, check(list), {"000000000000abcd"});
}

TEST_F(Validation, IndexOutOfRange_IsRejected) {
  expect(RejectionCode::kIndexOutOfRange, check(make_list(family_, {1, 512, 3})),
         {"block 512", "position 1", "512 blocks"});
}

TEST_F(Validation, CountMismatch_IsRejected) {
  expect(RejectionCode::kCountMismatch, check(make_list(family_, {1, 2})), {"2 blocks", "3"});
  expect(RejectionCode::kCountMismatch, check(make_list(family_, {}), 0), {"0 blocks"});
  expect(RejectionCode::kCountMismatch, validate_pair(make_list(family_, {1}), make_list(family_, {1, 2})),
         {"1 source", "2 destination"});
}

TEST_F(Validation, LengthMismatch_IsRejected) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.piece_bytes = 8192;
  expect(RejectionCode::kLengthMismatch, check(list), {"8192", "16384"});
  expect(RejectionCode::kLengthMismatch, validate_pair(make_list(family_, {1, 2, 3}), list), {"8192", "16384"});
}

TEST_F(Validation, SameBaseOtherBlockLength_IsRejected) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.block_len = 32768;
  expect(RejectionCode::kBaseConflict, check(list), {"32768", "16384", "0x1000000000"});
}

TEST_F(Validation, UnregisteredAddress_IsRejected) {
  BlockList list = make_list(family_, {1, 2, 3});
  list.bases[40] += std::uint64_t{1} << 40;
  expect(RejectionCode::kUnregistered, check(list), {"layer 40", "0x11"});
  memory_ = {};
  memory_.add(family_.bases[0], family_.bytes() - 1);
  expect(RejectionCode::kUnregistered, validate_family({family_, memory_}), {"layer 79"});
}

TEST_F(Validation, Overflow_IsRejected) {
  family_.num_blocks = std::size_t{1} << 60;
  expect(RejectionCode::kGeometryMismatch, validate_family({family_, memory_}), {"overflow"});
}

TEST_F(Validation, PairOfDifferentFamilies_IsRejected) {
  const BlockList kv = make_list(family_, {1});
  BlockList lf = kv;
  lf.family = FamilyId::kLf;
  expect(RejectionCode::kWrongFamily, validate_pair(kv, lf), {"0", "1"});
  BlockList other = kv;
  other.geometry_hash = 1;
  expect(RejectionCode::kGeometryMismatch, validate_pair(kv, other), {});
}

TEST_F(Validation, BlockWrittenTwice_IsRejected) {
  BlockReservations reservations(512);
  const std::vector<std::uint32_t> twice{4, 9, 4};
  expect(RejectionCode::kOverlappingDestination, reservations.reserve(1, twice),
         {"block 4", "position 0", "position 2"});
  const std::vector<std::uint32_t> once{4, 9};
  EXPECT_FALSE(reservations.reserve(7, once)) << "a rejected list reserves nothing";
  const std::vector<std::uint32_t> others{3, 9};
  expect(RejectionCode::kOverlappingDestination, reservations.reserve(8, others),
         {"block 9", "position 1", "request 7"});
  reservations.release(once);
  EXPECT_FALSE(reservations.reserve(8, others));
  const std::vector<std::uint32_t> beyond{512};
  expect(RejectionCode::kIndexOutOfRange, reservations.reserve(9, beyond), {"512"});
}

// With quadratic time this makes 10^12 comparisons, which no time limit of a test allows.
TEST_F(Validation, MillionBlocks_AreAccepted) {
  constexpr std::uint32_t kBlocks = 1 << 20;
  family_.num_blocks = kBlocks;
  std::vector<std::uint32_t> blocks(kBlocks);
  std::iota(blocks.begin(), blocks.end(), 0U);
  const BlockList list = make_list(family_, blocks);
  EXPECT_FALSE(check(list, kBlocks));
  BlockReservations reservations(kBlocks);
  EXPECT_FALSE(reservations.reserve(1, list.blocks));
  const std::vector<std::uint32_t> last{kBlocks - 1};
  EXPECT_TRUE(reservations.reserve(2, last)) << "all blocks are reserved";
}

TEST(NextFallback, EveryStage_LeadsToNext) {
  EXPECT_EQ(FallbackStage::kFresh, next_stage(FallbackStage::kDirect, true));
  EXPECT_EQ(FallbackStage::kStaged, next_stage(FallbackStage::kDirect, false));
  EXPECT_EQ(FallbackStage::kStaged, next_stage(FallbackStage::kFresh, true));
  EXPECT_EQ(FallbackStage::kRecompute, next_stage(FallbackStage::kStaged, true));
  EXPECT_EQ(FallbackStage::kRecompute, next_stage(FallbackStage::kRecompute, true));
}

}  // namespace
}  // namespace verbatim::kv
