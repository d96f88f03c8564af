// How a receiver learns that a group has arrived: one RDMA WRITE_WITH_IMM on each QP that carried a part of it, and,
// when the immediate cannot tell the sizes, a record of them written into the receiver's memory before it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/cts.h"
#include "wire/limits.h"

namespace verbatim::wire {

// Where the receiver finds the sizes of the members.
enum class SizeSource : std::uint8_t {
  kByteCount = 0,  // one member: the bytes that the completions of all parts count
  kRecord = 1,     // the record ring, written together with this immediate
  kPosted = 2,     // every member filled its buffer
  kElsewhere = 3,  // another part says
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

// The record ring in the receiver's memory: the bytes that each member really got, at the member's ring entry.
struct SizeRecord {
  std::uint64_t size[kRingEntries];
};

}  // namespace verbatim::wire
