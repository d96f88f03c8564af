// Patterns, elements and their sums: the contents of test messages depend on source, step and offset.
#include "workload/content.h"

#include <gtest/gtest.h>

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

class SumOfElements : public testing::TestWithParam<ElementType> {};

TEST_P(SumOfElements, AnyOrderAndOffset_GivesSameSum) {
  constexpr std::size_t kBytes = 10'000 - 10'000 % 8;
  const ElementType type = GetParam();
  std::vector<std::uint8_t> forward(kBytes), backward(kBytes);
  for (std::uint64_t source = 0; source < 5; ++source) {
    add_elements(type, forward.data(), forward.data(), bytes_of(Elements(type, source, 9), kBytes).data(), kBytes);
    add_elements(type, backward.data(), bytes_of(Elements(type, 4 - source, 9), kBytes).data(), backward.data(),
                 kBytes);
  }
  const Sum sum(type, 5, 9);
  EXPECT_EQ(forward, backward);
  EXPECT_EQ(forward, bytes_of(sum, kBytes));
  const std::vector<std::uint8_t> tail(forward.begin() + 4'800, forward.end());
  EXPECT_EQ(tail, bytes_of(sum, kBytes - 4'800, 4'800));
  EXPECT_NE(forward, bytes_of(Sum(type, 5, 8), kBytes));
  EXPECT_NE(forward, bytes_of(Sum(type, 4, 9), kBytes));
}

INSTANTIATE_TEST_SUITE_P(Types, SumOfElements,
                         testing::Values(ElementType::kInt8, ElementType::kUint8, ElementType::kInt32,
                                         ElementType::kUint32, ElementType::kInt64, ElementType::kUint64,
                                         ElementType::kFloat),
                         [](const auto& tested) { return std::string(element_name(tested.param)); });

TEST(AddElements, IntegersAndFloats_WrapAndAdd) {
  std::uint32_t whole = 0xffffffff;
  const std::uint32_t two = 2;
  add_elements(ElementType::kUint32, &whole, &whole, &two, sizeof whole);
  EXPECT_EQ(1U, whole);
  float half = 0.5F;
  add_elements(ElementType::kFloat, &half, &half, &half, sizeof half);
  EXPECT_EQ(1.0F, half);
}

}  // namespace
}  // namespace verbatim::workload
