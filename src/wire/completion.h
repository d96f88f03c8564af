// The completion signal of a group. Each QP that carries a part of the group sends a signal after its data. If the
// signal cannot hold the sizes of the members, the sender first writes them into the CompletionRecord, in the
// receiver's memory. Of a single message the receiver adds what the immediate has, in units of the buffer, and the
// number of bytes that came with it: all of a message in one WRITE_WITH_IMM, or less than a unit from the end of the
// first part.
//   immediate:  an RDMA WRITE_WITH_IMM, which consumes a posted receive
//   atomic:     a fetch-and-add to the group's arrival word, which the receiver polls
//   none:       for a group with CtsFlags::kOptionalCompletion; the sender only updates CompletionRecord::consumed from
//               time to time
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "wire/cts.h"
#include "wire/limits.h"

namespace verbatim::wire {

// Where the receiver finds the sizes of the members.
enum class SizeSource : std::uint8_t {
  kByteCount = 0,  // Immediate::units, and byte_len of the work completion: the group has one member
  kRecord = 1,     // CompletionRecord::size, written before this immediate
  kPosted = 2,     // each member has the size of its buffer
  kOtherPart = 3,  // the immediate of another part has the size source
};

struct Immediate {
  std::uint32_t entry = 0;  // ring index of the group's first member
  SizeSource sizes = SizeSource::kByteCount;
  std::uint32_t parts = 1;  // number of immediates of the group, 1 to kMaxQps; 0: as the other parts say
  std::uint32_t pass = 0;   // ring_pass of the first member: detects an immediate of another pass of the ring
  std::uint32_t units = 0;  // with kByteCount: units of the buffer, beside the bytes that came with the immediate
};

constexpr std::uint32_t kPassBits = 15;
constexpr std::uint32_t kPassMask = (1U << kPassBits) - 1;

constexpr std::uint32_t ring_pass(std::uint32_t member) {
  return (member / kMaxInFlight) & kPassMask;
}

// A message that is shorter than its buffer has fewer than 2^kUnitBits units.
constexpr unsigned kUnitBits = 6;
constexpr std::uint32_t kUnitMask = (1U << kUnitBits) - 1;

// A unit of this buffer has 2^unit_shift bytes.
constexpr unsigned unit_shift(std::uint64_t buffer_bytes) {
  const auto width = static_cast<unsigned>(std::bit_width(buffer_bytes - (buffer_bytes != 0 ? 1 : 0)));
  return width > kUnitBits ? width - kUnitBits : 0;
}
constexpr std::uint64_t bytes_of_units(std::uint32_t units, std::uint64_t buffer_bytes) {
  return std::uint64_t{units} << unit_shift(buffer_bytes);
}

// Bits 0-7: entry, 8-9: size source, 10-16: parts - 1, 17-31: pass. With kByteCount bits 10-15: units, 16: there are
// other parts.
constexpr std::uint32_t encode_immediate(const Immediate& immediate) {
  const std::uint32_t field = immediate.sizes == SizeSource::kByteCount
                                  ? immediate.units | (immediate.parts == 1 ? 0U : 1U) << kUnitBits
                                  : immediate.parts - 1;
  return immediate.entry | static_cast<std::uint32_t>(immediate.sizes) << 8 | field << 10 | immediate.pass << 17;
}
constexpr Immediate decode_immediate(std::uint32_t bits) {
  const std::uint32_t entry = bits & 0xff;
  const auto sizes = static_cast<SizeSource>(bits >> 8 & 0x3);
  const std::uint32_t field = bits >> 10 & 0x7f;
  const std::uint32_t pass = bits >> 17;
  if (sizes == SizeSource::kByteCount)
    return {entry, sizes, field >> kUnitBits == 0 ? 1U : 0U, pass, field & kUnitMask};
  return {entry, sizes, field + 1, pass};
}
// One part and no units.
constexpr bool is_simple_immediate(std::uint32_t bits) {
  return (bits >> 10 & 0x7f) == 0;
}
static_assert(kMaxInFlight == 1U << 8 && kMaxQps == 1U << 7);

// The arrival word of a group is 0 when the receiver writes its CTS. Each part adds its number of bytes (low 48 bits)
// and a count (high 16 bits). Part 0 adds kArrivalComplete - (parts - 1), each other part adds 1: the sum is
// kArrivalComplete for any number of parts, so the receiver need not know this number.
constexpr unsigned kArrivalShift = 48;
constexpr std::uint64_t kArrivalBytesMask = (std::uint64_t{1} << kArrivalShift) - 1;
constexpr std::uint64_t kArrivalComplete = kMaxQps;

constexpr std::uint64_t encode_arrival(std::uint64_t bytes, std::uint32_t part, std::uint32_t parts) {
  return (part == 0 ? kArrivalComplete - (parts - 1) : 1) << kArrivalShift | bytes;
}

// The receiver's memory into which the sender writes. `size` has one entry for each member of a group; the arrival word
// of a group is that of its first member.
struct CompletionRecord {
  std::uint64_t size[kRingEntries];  // bytes received by each member
  std::uint64_t consumed;            // number of CTS entries that the sender has used; for optional completions only
  std::uint64_t arrival[kMaxInFlight];
};

constexpr std::size_t completion_record_bytes(bool atomic) {
  return atomic ? sizeof(CompletionRecord) : offsetof(CompletionRecord, arrival);
}

}  // namespace verbatim::wire
