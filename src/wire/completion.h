// How a receiver learns that a group has arrived. Each QP that carried a part of it says so behind its data, and when
// that word cannot tell the sizes, a record of them is written into the receiver's memory before it.
//   imm:     an RDMA WRITE_WITH_IMM, which takes a posted receive
//   atomic:  a fetch-and-add to the group's arrival word, which the receiver polls
//   silent:  nothing (CtsFlags::kSilent), but every so often the number of members that were taken
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/cts.h"
#include "wire/limits.h"

namespace verbatim::wire {

// Where the receiver finds the sizes of the members.
enum class SizeSource : std::uint8_t {
  kByteCount = 0,  // a message alone: the bytes that its completion counts
  kRecord = 1,     // the record ring, written together with this immediate
  kPosted = 2,     // every member filled its buffer
  kOtherPart = 3,  // another part says
};

struct Immediate {
  std::uint32_t entry = 0;  // ring index of the group's first member
  SizeSource sizes = SizeSource::kByteCount;
  std::uint32_t parts = 1;  // immediates that make up the group, 1 to kMaxQps
  std::uint32_t pass = 0;   // low bits of how often the ring has been gone round: tells a stray from the expected
};

constexpr std::uint32_t kPassBits = 15;
constexpr std::uint32_t kPassMask = (1U << kPassBits) - 1;

constexpr std::uint32_t ring_pass(std::uint32_t member) {
  return (member / kMaxInFlight) & kPassMask;
}

// bits 0-7 entry, 8-9 size source, 10-16 parts - 1, 17-31 pass
constexpr std::uint32_t encode_immediate(const Immediate& immediate) {
  return immediate.entry | static_cast<std::uint32_t>(immediate.sizes) << 8 | (immediate.parts - 1) << 10 |
         immediate.pass << 17;
}
constexpr Immediate decode_immediate(std::uint32_t bits) {
  return {bits & 0xff, static_cast<SizeSource>(bits >> 8 & 0x3), (bits >> 10 & 0x7f) + 1, bits >> 17};
}
static_assert(kMaxInFlight == 1U << 8 && kMaxQps == 1U << 7);

// The arrival word of a group, 0 when its CTS leaves: every part adds its bytes and a share of kWholeArrival; the first
// part's share makes up for the others', so that the receiver need not know beforehand how many parts there are.
constexpr unsigned kArrivalShift = 48;
constexpr std::uint64_t kArrivalBytesMask = (std::uint64_t{1} << kArrivalShift) - 1;
constexpr std::uint64_t kArrivalComplete = kMaxQps;

constexpr std::uint64_t encode_arrival(std::uint64_t bytes, std::uint32_t part, std::uint32_t parts) {
  return (part == 0 ? kArrivalComplete - (parts - 1) : 1) << kArrivalShift | bytes;
}

// What the sender writes in the receiver's memory. A group's sizes lie at its members' ring entries, its arrival word
// at the first of them.
struct CompletionRecord {
  std::uint64_t size[kRingEntries];  // bytes that each member really got
  std::uint64_t consumed;            // members whose CTS entries were used, told with silent groups
  std::uint64_t arrival[kMaxInFlight];
};

constexpr std::size_t completion_record_bytes(bool atomic) {
  return atomic ? sizeof(CompletionRecord) : offsetof(CompletionRecord, arrival);
}

}  // namespace verbatim::wire
