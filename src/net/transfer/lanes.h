// How the data of a connection is divided among its QPs. A lane is a pair of ports, one at each end, with the QPs
// between them. Pure functions: send_comm.h keeps what is outstanding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace verbatim {

// The ports of a QP: an index into the ports of this end, and one into those of the peer.
struct QpLane {
  std::uint8_t device = 0;
  std::uint8_t remote_device = 0;
};

// The share of the fastest QP. Small, so that divide_by_load() needs no more than 64 bits.
inline constexpr std::uint32_t kLargestShare = 64;

// What each QP can carry in relation to the others, 1 to kLargestShare. A port divides its declared speed (Mb/s) among
// its QPs, and a QP has the smaller part of its two ports. 0: the QP is on a standby lane, which is declared below an
// eighth of the fastest lane and carries no messages.
std::vector<std::uint32_t> qp_shares(std::span<const QpLane> qps, std::span<const std::uint32_t> speeds_mbps,
                                     std::span<const std::uint32_t> remote_speeds_mbps);

// The first QP with the largest share.
std::size_t fastest_qp(std::span<const std::uint32_t> shares);

// The QPs in the order in which messages that are not striped use them; it is repeated for ever. A QP comes up to eight
// times, in proportion to its share.
std::vector<std::uint8_t> qp_turns(std::span<const std::uint32_t> shares);

// What a QP can carry, and what it has not sent yet.
struct QpLoad {
  std::uint32_t share = 0;
  std::uint32_t outstanding = 0;  // units of kLoadUnitBytes
};
inline constexpr unsigned kLoadUnitShift = 15;
inline constexpr std::uint64_t kMaxLoadUnits = (1U << 13) - 1;
// Rounded to the nearest unit.
constexpr std::uint64_t load_units(std::uint64_t bytes) {
  const std::uint64_t units = (bytes >> kLoadUnitShift) + (bytes >> (kLoadUnitShift - 1) & 1);
  return units < kMaxLoadUnits ? units : kMaxLoadUnits;
}

// The part of a message that one QP carries: from the end of the stripe before it to `end`.
struct Stripe {
  std::uint32_t queue = 0;  // index of the QP
  std::uint32_t end = 0;    // of 65,536 parts of the message
};
inline constexpr std::uint32_t kWholeMessage = 1U << 16;

// Divides a message so that all QPs finish together, with what they have outstanding. A QP that would get less than a
// sixteenth of its share gets nothing. Returns the number of stripes, at least 1 and at most as many as QPs;
// `stripes` has room for those. At least one load has a share.
std::size_t divide_by_load(std::uint64_t bytes, std::span<const QpLoad> loads, std::span<Stripe> stripes);

// Where a stripe of `bytes` ends. Stripes begin at multiples of 128 bytes: LL128 writes lines of this size, which must
// not be cut.
constexpr std::uint64_t stripe_end(std::uint64_t bytes, const Stripe& stripe) {
  constexpr std::uint64_t kLineBytes = 128;
  if (stripe.end == kWholeMessage) return bytes;
  const std::uint64_t end = (bytes >> 16) * stripe.end + ((bytes & 0xffff) * stripe.end >> 16);
  const std::uint64_t aligned = (end + kLineBytes - 1) / kLineBytes * kLineBytes;
  return aligned < bytes ? aligned : bytes;
}

}  // namespace verbatim
