#include "wire/cts.h"

#include <gtest/gtest.h>

namespace verbatim::wire {
namespace {

TEST(Cts, EntryOfOneOrTwoDevices_Has32Bytes) {
  EXPECT_EQ(cts_entry_bytes(1), 32U);
  EXPECT_EQ(cts_entry_bytes(2), 32U);
  EXPECT_EQ(offsetof(CtsEntry, ready) + sizeof(std::uint32_t), sizeof(CtsEntry));
}

TEST(Cts, EntryOfSeveralDevices_IsOneCacheLine) {
  for (std::size_t devices = 3; devices <= kMaxDevices; ++devices) EXPECT_EQ(cts_entry_bytes(devices), 64U);
  EXPECT_EQ(offsetof(CtsWideEntry, rkey), offsetof(CtsEntry, rkey));
  EXPECT_EQ(offsetof(CtsWideEntry, ready) + sizeof(std::uint32_t), sizeof(CtsWideEntry));
}

TEST(Cts, SizeGroupAndFlags_ShareOneWord) {
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32, CtsSize::kMaxBytes}) {
    for (std::uint32_t members = 1; members <= kMaxGroup; ++members) {
      for (const CtsFlags flags : {CtsFlags::kNone, CtsFlags::kOptionalCompletion}) {
        const CtsSize group = CtsSize::of_group(members, flags);
        const CtsSize size(bytes, group);
        EXPECT_EQ(size.bytes(), bytes);
        EXPECT_EQ(size.group_size(), members);
        EXPECT_EQ(size.flags(), flags);
        EXPECT_TRUE(size.is_of(group));
        EXPECT_EQ(size.is_of(kSingleReceive), members == 1 && flags == CtsFlags::kNone);
      }
    }
  }
}

TEST(Cts, AnyGroup_StaysInsideRing) {
  for (std::uint32_t member = 0; member < 3 * kMaxInFlight; ++member) {
    EXPECT_LE(ring_index(member) + kMaxGroup, kRingEntries);
  }
}

TEST(Cts, GroupsInFlight_ShareNoEntries) {
  // Groups of each size, with as many outstanding as allowed: less than kMaxInFlight members apart.
  for (std::uint32_t size = 1; size <= kMaxGroup; ++size) {
    for (std::uint32_t first = 0; first < 2 * kMaxInFlight; ++first) {
      const std::uint32_t next = first + size;
      for (std::uint32_t i = 0; i < size; ++i) {
        for (std::uint32_t other = next; other + 1 - first <= kMaxInFlight; other += size) {
          ASSERT_NE(ring_index(first) + i, ring_index(other)) << first << " " << other;
        }
      }
    }
  }
}

}  // namespace
}  // namespace verbatim::wire
