#include "wire/completion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace verbatim::wire {
namespace {

TEST(Immediate, EveryField_RoundTrips) {
  for (const std::uint32_t entry : {0U, 1U, 255U}) {
    for (const SizeSource sizes : {SizeSource::kRecord, SizeSource::kPosted, SizeSource::kOtherPart}) {
      for (const std::uint32_t parts : {1U, 2U, 127U, 128U}) {
        for (const std::uint32_t pass : {0U, 1U, kPassMask}) {
          const Immediate decoded = decode_immediate(encode_immediate({entry, sizes, parts, pass}));
          EXPECT_EQ(decoded.entry, entry);
          EXPECT_EQ(decoded.sizes, sizes);
          EXPECT_EQ(decoded.parts, parts);
          EXPECT_EQ(decoded.pass, pass);
        }
      }
    }
  }
}

TEST(Immediate, ByteCount_RoundTripsWithUnits) {
  for (const std::uint32_t parts : {0U, 1U}) {
    for (const std::uint32_t units : {0U, 1U, kUnitMask}) {
      for (const std::uint32_t pass : {0U, kPassMask}) {
        const Immediate decoded = decode_immediate(encode_immediate({255, SizeSource::kByteCount, parts, pass, units}));
        EXPECT_EQ(decoded.entry, 255U);
        EXPECT_EQ(decoded.sizes, SizeSource::kByteCount);
        EXPECT_EQ(decoded.parts, parts);
        EXPECT_EQ(decoded.pass, pass);
        EXPECT_EQ(decoded.units, units);
      }
    }
  }
  // The sender gives the number of the parts, the receiver learns it from the others.
  EXPECT_EQ(decode_immediate(encode_immediate({.sizes = SizeSource::kByteCount, .parts = 2})).parts, 0U);
}

TEST(Immediate, EveryMessageBelowItsBuffer_HasUnitsThatFit) {
  for (unsigned bits = 0; bits < 40; ++bits) {
    for (const std::int64_t off : {-1, 0, 1}) {
      const std::uint64_t buffer = (std::uint64_t{1} << bits) + static_cast<std::uint64_t>(off);
      if (buffer == 0) continue;
      const std::uint64_t unit = std::uint64_t{1} << unit_shift(buffer);
      EXPECT_LE((buffer - 1) / unit, kUnitMask) << buffer;
      EXPECT_LE(unit, std::max<std::uint64_t>(buffer / 32, 1)) << buffer;
    }
  }
}

TEST(Immediate, ImmediateOfEarlierPass_IsDistinguished) {
  EXPECT_EQ(ring_pass(0), ring_pass(255));
  EXPECT_NE(ring_pass(255), ring_pass(256));
  EXPECT_NE(ring_pass(0xffffffff), ring_pass(0));  // also when the member numbers wrap
}

TEST(Ring, SequenceNumbersWrap_IndexAndPassContinue) {
  constexpr std::uint32_t kLast = 0xffffffff;
  EXPECT_EQ(ring_index(kLast), kMaxInFlight - 1);
  EXPECT_EQ(ring_index(kLast + 1), 0U);
  for (std::uint32_t member = kLast - 2 * kMaxInFlight; member != 2 * kMaxInFlight; ++member) {
    EXPECT_EQ(ring_index(member + 1), (ring_index(member) + 1) % kMaxInFlight) << member;
    EXPECT_EQ(ring_index(member + kMaxInFlight), ring_index(member)) << member;
    // The next member at the same ring entry has another pass. Members that are outstanding together are at most one
    // pass apart.
    EXPECT_EQ(ring_pass(member + kMaxInFlight), (ring_pass(member) + 1) & kPassMask) << member;
    EXPECT_LE(ring_pass(member), kPassMask);
  }
  // A group whose member numbers wrap uses consecutive entries: the ring has kMaxGroup - 1 more entries for it.
  EXPECT_EQ(ring_index(kLast) + kMaxGroup, kRingEntries);
}

TEST(Arrival, AllParts_AddUpInAnyOrder) {
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{300} << 10, std::uint64_t{1} << 40}) {
    for (std::uint32_t parts = 1; parts <= kMaxQps; ++parts) {
      const std::uint64_t share = bytes / parts;
      const auto addend = [&](std::uint32_t part) {
        return encode_arrival(part + 1 == parts ? bytes - share * (parts - 1) : share, part, parts);
      };
      std::uint64_t sum = 0;
      for (std::uint32_t part = 0; part < parts; ++part) sum += addend(part);
      EXPECT_EQ(sum >> kArrivalShift, kArrivalComplete) << parts;
      EXPECT_EQ(sum & kArrivalBytesMask, bytes) << parts;
      // Without any one part the arrival is not complete: neither without the first, which adds more, nor another.
      for (std::uint32_t missing = 0; missing < parts; ++missing) {
        EXPECT_LT((sum - addend(missing)) >> kArrivalShift, kArrivalComplete) << missing << " of " << parts;
      }
    }
  }
}

TEST(Arrival, LargestGroup_BytesDoNotOverflowIntoCount) {
  // Members of 1 TiB each, which is more than any registration has.
  const std::uint64_t bytes = kMaxGroup * (std::uint64_t{1} << 40);
  EXPECT_LT(bytes, kArrivalBytesMask);
  const std::uint64_t word = encode_arrival(bytes, 0, 1);
  EXPECT_EQ(word >> kArrivalShift, kArrivalComplete);
  EXPECT_EQ(word & kArrivalBytesMask, bytes);
}

TEST(CompletionRecord, ArrivalWords_AreAlignedForAtomics) {
  EXPECT_EQ(offsetof(CompletionRecord, arrival) % sizeof(std::uint64_t), 0U);
  EXPECT_LT(completion_record_bytes(false), completion_record_bytes(true));
  EXPECT_EQ(completion_record_bytes(false), offsetof(CompletionRecord, arrival));
}

}  // namespace
}  // namespace verbatim::wire
