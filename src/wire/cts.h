// Clear to send: what a receiver writes into its sender's ring, one entry a member of a grouped receive.
//
//   sender's memory:  [ entry 0 | entry 1 | ... | entry 255 | 7 more ]
//
// Members are numbered from 0 for the life of the connection; a group whose first member has number s lies at entry
// s mod 256 and the entries behind it, so that it never wraps: that is what the last 7 are for. An entry is valid when
// its `ready` equals its member's number + 1, so no entry is ever cleared. Entries are 32 bytes for one device and 64
// for more, never across a cache line, and `ready` is their last word: one PCIe write brings it with or after the rest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/limits.h"

namespace verbatim::wire {

constexpr std::uint32_t kRingMask = kMaxInFlight - 1;
constexpr std::uint32_t kRingEntries = kMaxInFlight + kMaxGroup - 1;
static_assert((kMaxInFlight & kRingMask) == 0);

constexpr std::uint32_t ring_index(std::uint32_t member) {
  return member & kRingMask;
}

// kSilent: the receiver looks at the data itself and wants to hear of no completion.
enum class CtsFlags : std::uint8_t { kNone = 0, kOptionalCompletion = 1 };

struct CtsHead {
  std::uint64_t address;  // of the receive buffer
  std::uint64_t size;     // bytes that fit there
  std::uint32_t tag;
  std::uint8_t group_size;  // members of this group, the same in each of them
  CtsFlags flags;           // likewise
  std::uint8_t reserved[2];
};
static_assert(sizeof(CtsHead) == 24);

// An entry for receivers with one device.
struct CtsEntry {
  CtsHead head;
  std::uint32_t rkey;
  std::uint32_t ready;
};
static_assert(sizeof(CtsEntry) == 32);

// An entry for receivers with 2 to 8 devices.
struct CtsWideEntry {
  CtsHead head;
  std::uint32_t rkey[kMaxDevices];
  std::uint32_t reserved;
  std::uint32_t ready;
};
static_assert(sizeof(CtsWideEntry) == 64);

constexpr std::size_t cts_entry_bytes(std::size_t devices) {
  return devices == 1 ? sizeof(CtsEntry) : sizeof(CtsWideEntry);
}
constexpr std::size_t cts_ring_bytes(std::size_t devices) {
  return cts_entry_bytes(devices) * kRingEntries;
}

}  // namespace verbatim::wire
