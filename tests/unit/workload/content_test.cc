// Patterns, elements and their reductions: the contents of test messages depend on source, step and offset.
#include "workload/content.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace verbatim::workload {
namespace {

std::vector<std::uint8_t> bytes_of(const Content& content, std::size_t bytes, std::uint64_t offset = 0) {
  std::vector<std::uint8_t> out(bytes);
  content.produce(out.data(), bytes, offset);
  return out;
}

TEST(Pattern, AnyOffset_EqualsThatPartOfWhole) {
  const Pattern pattern(3, 7);
  const auto whole = bytes_of(pattern, 100);
  for (std::size_t offset = 0; offset < 40; ++offset) {
    for (std::size_t bytes = 1; bytes < 40; ++bytes) {
      const auto piece = bytes_of(pattern, bytes, offset);
      ASSERT_EQ(0, std::memcmp(piece.data(), whole.data() + offset, bytes)) << offset << "+" << bytes;
    }
  }
}

TEST(Pattern, SourceStepAndOffset_GiveDifferentBytes) {
  std::set<std::vector<std::uint8_t>> seen;
  for (std::uint64_t source = 0; source < 20; ++source) {
    for (std::uint64_t step = 0; step < 20; ++step) {
      for (std::uint64_t offset = 0; offset < 20; ++offset) seen.insert(bytes_of(Pattern(source, step), 8, offset));
    }
  }
  EXPECT_EQ(20U * 20U * 20U, seen.size());
}

TEST(Pattern, OneMebibyte_RepeatsNoWord) {
  const auto bytes = bytes_of(Pattern(0, 0), std::size_t{1} << 20);
  std::set<std::uint64_t> words;
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    words.insert(word);
  }
  EXPECT_EQ(bytes.size() / 8, words.size());
}

struct Operands {
  ElementType type;
  ReductionKind kind;
};

std::vector<Operands> all_operands() {
  std::vector<Operands> all;
  for (std::size_t type = 0; type < kElementTypes; ++type) {
    for (std::size_t kind = 0; kind < kReductionKinds; ++kind) {
      all.push_back({static_cast<ElementType>(type), static_cast<ReductionKind>(kind)});
    }
  }
  return all;
}

class ReductionOfElements : public testing::TestWithParam<Operands> {};

// A ring begins at any rank, and multiplies a contribution where it arrives; the last rank divides.
TEST_P(ReductionOfElements, AnyOrderAndOffset_GivesSameResult) {
  constexpr std::size_t kBytes = 10'000 - 10'000 % 8;
  const ElementType type = GetParam().type;
  const ReductionKind kind = GetParam().kind;
  const auto ranks = static_cast<std::uint64_t>(std::min(max_exact_ranks(type), 32));
  const auto multiplier_of = [&](std::uint64_t rank) { return kind == ReductionKind::kMulSum ? multiplier(rank) : 1; };
  const auto reduced_from = [&](std::uint64_t first) {
    std::vector<std::uint8_t> result = bytes_of(Elements(type, first, 9, kind), kBytes);
    for (std::uint64_t i = 1; i < ranks; ++i) {
      const std::uint64_t rank = (first + i) % ranks;
      reduce_elements({.type = type,
                       .kind = kind,
                       .left_multiplier = i == 1 ? multiplier_of(first) : 1,
                       .right_multiplier = multiplier_of(rank),
                       .divisor = kind == ReductionKind::kAvg && i + 1 == ranks ? static_cast<int>(ranks) : 1},
                      result.data(), result.data(), bytes_of(Elements(type, rank, 9, kind), kBytes).data(), kBytes);
    }
    return result;
  };
  const std::vector<std::uint8_t> result = bytes_of(Reduced(type, kind, ranks, 9), kBytes);
  EXPECT_EQ(result, reduced_from(0));
  EXPECT_EQ(result, reduced_from(3));
  const std::vector<std::uint8_t> tail(result.begin() + 4'800, result.end());
  EXPECT_EQ(tail, bytes_of(Reduced(type, kind, ranks, 9), kBytes - 4'800, 4'800));
  EXPECT_NE(bytes_of(Reduced(type, kind, 3, 9), kBytes), bytes_of(Reduced(type, kind, 3, 8), kBytes));
  EXPECT_NE(bytes_of(Reduced(type, kind, 3, 9), kBytes), bytes_of(Reduced(type, kind, 2, 9), kBytes));
}

// An average of 8 bits is 0 with many more ranks, as in NCCL: the sum wraps before it is divided.
TEST_P(ReductionOfElements, LostOneOfManyRanks_ChangesResult) {
  const ElementType type = GetParam().type;
  const ReductionKind kind = GetParam().kind;
  const std::size_t bytes = 6'000 * element_bytes(type);
  const int most = kind == ReductionKind::kAvg ? 100 : max_exact_ranks(type);
  const auto ranks = static_cast<std::uint64_t>(std::min(max_exact_ranks(type), most));
  EXPECT_NE(bytes_of(Reduced(type, kind, ranks, 9), bytes), bytes_of(Reduced(type, kind, ranks - 1, 9), bytes));
}

INSTANTIATE_TEST_SUITE_P(TypesAndKinds, ReductionOfElements, testing::ValuesIn(all_operands()), [](const auto& tested) {
  return std::string(element_name(tested.param.type)) + "_" + reduction_name(tested.param.kind);
});

template <typename T>
T reduced(Reduction reduction, T left, T right) {
  reduce_elements(reduction, &left, &left, &right, sizeof left);
  return left;
}

TEST(ReduceElements, Integers_WrapAndHaveSigns) {
  EXPECT_EQ(1U, reduced<std::uint32_t>({ElementType::kUint32, ReductionKind::kSum}, 0xffffffff, 2));
  EXPECT_EQ(4, reduced<std::int8_t>({ElementType::kInt8, ReductionKind::kProd}, -126, 2));
  EXPECT_EQ(1, reduced<std::int8_t>({ElementType::kInt8, ReductionKind::kMax}, -1, 1));
  EXPECT_EQ(1, reduced<std::uint8_t>({ElementType::kUint8, ReductionKind::kMin}, 255, 1));
  EXPECT_EQ(-2, reduced<std::int32_t>({.type = ElementType::kInt32, .kind = ReductionKind::kAvg, .divisor = 3}, -8, 1));
  EXPECT_EQ(-3, reduced<std::int64_t>(
                    {.type = ElementType::kInt64, .kind = ReductionKind::kMulSum, .right_multiplier = -1}, 2, 5));
}

// Bits of the values from IEEE 754, and for 8 bits from the table of the Open Compute Project.
TEST(ReduceElements, Floats_HaveTheirFormats) {
  EXPECT_EQ(1.0F, reduced<float>({ElementType::kFloat, ReductionKind::kSum}, 0.5F, 0.5F));
  EXPECT_EQ(-6.0, reduced<double>({ElementType::kDouble, ReductionKind::kProd}, 2, -3));
  // 1 + 0.5, 1 + 2^-11 (to even), 65504 + 65504 (the largest), and the smallest number, twice.
  EXPECT_EQ(0x3e00, reduced<std::uint16_t>({ElementType::kHalf, ReductionKind::kSum}, 0x3c00, 0x3800));
  EXPECT_EQ(0x3c00, reduced<std::uint16_t>({ElementType::kHalf, ReductionKind::kSum}, 0x3c00, 0x1000));
  EXPECT_EQ(0x7bff, reduced<std::uint16_t>({ElementType::kHalf, ReductionKind::kSum}, 0x7bff, 0x7bff));
  EXPECT_EQ(0x0002, reduced<std::uint16_t>({ElementType::kHalf, ReductionKind::kSum}, 0x0001, 0x0001));
  EXPECT_EQ(0xc040, reduced<std::uint16_t>({ElementType::kBfloat16, ReductionKind::kProd}, 0xbf80, 0x4040));  // -3
  EXPECT_EQ(0x0000, reduced<std::uint16_t>({ElementType::kHalf, ReductionKind::kSum}, 0x0000, 0x0000));
  // 448, the largest; 1 and -2, of 8 bits.
  EXPECT_EQ(0x7e, reduced<std::uint8_t>({ElementType::kFloat8e4m3, ReductionKind::kMax}, 0x7e, 0x38));
  EXPECT_EQ(0xb8, reduced<std::uint8_t>({ElementType::kFloat8e4m3, ReductionKind::kSum}, 0x38, 0xc0));
  EXPECT_EQ(0xbc, reduced<std::uint8_t>({ElementType::kFloat8e5m2, ReductionKind::kSum}, 0x3c, 0xc0));
  EXPECT_EQ(0x38, reduced<std::uint8_t>({.type = ElementType::kFloat8e5m2, .kind = ReductionKind::kAvg, .divisor = 2},
                                        0x3c, 0x00));
}

}  // namespace
}  // namespace verbatim::workload
