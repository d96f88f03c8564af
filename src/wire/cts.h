// CTS (clear to send) entries: the receiver writes one entry for each member of a group into the sender's ring.
//
//   sender's memory:  [ entry 0 | entry 1 | ... | entry 255 | 7 more ]
//
// Members are numbered from 0 over the lifetime of the connection. A group whose first member has number s uses entry
// s mod 256 and the entries after it. With the 7 additional entries a group never wraps around. An entry is valid when
// `ready` is the member's number + 1, so entries need not be cleared. An entry has 32 bytes for one device and 64 bytes
// for more, so it never crosses a cache line. `ready` is its last word: within a cache line, a PCIe write makes it
// visible not before the other words.
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

// kOptionalCompletion: NCCL has called irecv with kNetOptionalRecvCompletion, because its kernels see the arrival in
// the data itself. The sender sends no completion signal.
enum class CtsFlags : std::uint8_t { kNone = 0, kOptionalCompletion = 1 };

struct CtsHead {
  std::uint64_t address;  // of the receive buffer
  std::uint64_t size;     // of the receive buffer, in bytes
  std::uint32_t tag;
  std::uint8_t group_size;  // number of members of the group, equal in all its entries
  CtsFlags flags;           // equal in all entries of the group
  std::uint8_t reserved[2];
};
static_assert(sizeof(CtsHead) == 24);

// The entry of a receiver with one device.
struct CtsEntry {
  CtsHead head;
  std::uint32_t rkey;
  std::uint32_t ready;
};
static_assert(sizeof(CtsEntry) == 32);

// The entry of a receiver with 2 to 8 devices.
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
