// CTS (clear to send) entries: the receiver writes one entry for each member of a group into the sender's ring.
//
//   sender's memory:  [ entry 0 | entry 1 | ... | entry 255 | 7 more ]
//
// Members are numbered from 0 over the lifetime of the connection. A group whose first member has number s uses entry
// s mod 256 and the entries after it. With the 7 additional entries a group never wraps around. An entry is valid when
// `ready` is the member's number + 1, so entries need not be cleared. An entry has 32 bytes for one or two devices and
// 64 bytes for more, so it never crosses a cache line. `ready` is its last word: within a cache line, a PCIe write
// makes it visible not before the other words.
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

// One word: the size of the receive buffer in bytes (48 bits), and what is equal in all entries of a group: the number
// of its members (8 bits) and its flags (8 bits).
class CtsSize {
 public:
  static constexpr std::uint64_t kMaxBytes = (std::uint64_t{1} << 48) - 1;

  constexpr CtsSize() = default;
  constexpr CtsSize(std::uint64_t bytes, CtsSize group) : word_(bytes << 16 | group.word_) {}
  // Without a size.
  static constexpr CtsSize of_group(std::uint32_t group_size, CtsFlags flags) {
    CtsSize group;
    group.word_ = group_size << 8 | static_cast<std::uint32_t>(flags);
    return group;
  }

  constexpr std::uint64_t bytes() const { return word_ >> 16; }
  constexpr std::uint32_t group_size() const { return word_ >> 8 & 0xff; }
  constexpr CtsFlags flags() const { return static_cast<CtsFlags>(word_ & 0xff); }
  constexpr bool is_of(CtsSize group) const { return (word_ & 0xffff) == group.word_; }

 private:
  std::uint64_t word_ = 0;
};

// A receive that is no group and has no flags.
inline constexpr CtsSize kSingleReceive = CtsSize::of_group(1, CtsFlags::kNone);

// The entry of a receiver with one or two devices.
struct CtsEntry {
  std::uint64_t address;  // of the receive buffer
  CtsSize size;
  std::uint32_t tag;
  std::uint32_t rkey[2];
  std::uint32_t ready;
};
static_assert(sizeof(CtsEntry) == 32);

// The entry of a receiver with 3 to 8 devices. The members up to `rkey` are where CtsEntry has them.
struct CtsWideEntry {
  std::uint64_t address;
  CtsSize size;
  std::uint32_t tag;
  std::uint32_t rkey[kMaxDevices];
  std::uint32_t reserved[2];
  std::uint32_t ready;
};
static_assert(sizeof(CtsWideEntry) == 64 && offsetof(CtsWideEntry, rkey) == offsetof(CtsEntry, rkey));

constexpr std::size_t cts_entry_bytes(std::size_t devices) {
  return devices <= 2 ? sizeof(CtsEntry) : sizeof(CtsWideEntry);
}
constexpr std::size_t cts_ring_bytes(std::size_t devices) {
  return cts_entry_bytes(devices) * kRingEntries;
}

}  // namespace verbatim::wire
