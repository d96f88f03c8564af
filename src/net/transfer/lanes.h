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

// A lane that is declared more than so many times slower than the fastest is a standby.
inline constexpr std::uint32_t kStandbyFactor = 8;

// The share of the fastest QP. Small, so that divide_by_load() needs no more than 64 bits.
inline constexpr std::uint32_t kLargestShare = 1024;

// What each QP can carry in relation to the others, 1 to kLargestShare. A port divides its declared speed (Mb/s) among
// its QPs; what one cannot use, because of its other port, the others get. 0: the QP is on a standby lane, which is
// declared below an eighth of the fastest lane and carries no messages.
std::vector<std::uint32_t> qp_shares(std::span<const QpLane> qps, std::span<const std::uint32_t> speeds_mbps,
                                     std::span<const std::uint32_t> remote_speeds_mbps);

// The first QP with the largest share.
std::size_t fastest_qp(std::span<const std::uint32_t> shares);

// The QPs in the order in which messages that are not striped use them; it is repeated for ever. A QP comes up to eight
// times, in proportion to its share.
std::vector<std::uint8_t> qp_turns(std::span<const std::uint32_t> shares);

// What a QP can carry, and what it has not sent yet, in KiB.
struct QpLoad {
  explicit QpLoad(std::uint32_t declared_share) : declared(declared_share), share(declared_share) {}

  std::uint32_t declared;  // by qp_shares
  std::uint32_t share;     // as measured
  std::uint32_t outstanding = 0;
  std::uint32_t completed = 0;  // since the last message
  std::uint64_t carried = 0;    // since adapt_shares()
};

// The size of a stripe in the 13 bits that a wr_id has for it: KiB, as a number of 10 bits and a power of 8. Loses less
// than a hundredth of the size.
inline constexpr unsigned kLoadBits = 13;
constexpr std::uint32_t encode_load(std::uint64_t bytes) {
  constexpr unsigned kMantissaBits = 10;
  std::uint64_t kib = (bytes + 512) >> 10;
  std::uint32_t power = 0;
  for (; kib >> kMantissaBits != 0; ++power) kib >>= 3;
  return power < 8 ? power << kMantissaBits | static_cast<std::uint32_t>(kib) : (1U << kLoadBits) - 1;
}
// At most 2^31 KiB.
constexpr std::uint32_t decode_load(std::uint32_t load) {
  if (load < 1024) [[likely]]
    return load;
  return (load & 0x3ff) << 3 * (load >> 10);
}

// The part of a message that one QP carries. A stripe begins where the one before it ends.
struct Stripe {
  std::uint32_t queue = 0;  // index of the QP
  std::uint32_t end = 0;    // of 65,536 parts of the message
  std::uint32_t begin = 0;
};
inline constexpr std::uint32_t kWholeMessage = 1U << 16;

// Sets the shares by what the QPs have carried while at least one of them had work all the time: bytes in proportion to
// their speeds, so no clock is needed. If some had finished before, these are the fast ones. A QP that is slower than
// declared, because of congestion or a slower link behind it, gets a smaller share, but not below a sixteenth of the
// declared one, so that it is measured again. Returns whether a share has changed.
bool adapt_shares(std::span<QpLoad> loads);

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

constexpr std::uint64_t stripe_begin(std::uint64_t bytes, const Stripe& stripe) {
  return stripe.begin == 0 ? 0 : stripe_end(bytes, {stripe.queue, stripe.begin});
}

// Divides the messages of a connection. Only striped messages and those that wait for free send work requests are
// counted: others are short. QPs take turns at them by declared speed alone.
class Striping {
 public:
  // Before all others; `shares` by qp_shares(). Again with other shares: what is outstanding stays.
  void set_shares(std::span<const std::uint32_t> shares);

  // The stripes of the next message. Valid until the next call.
  std::span<const Stripe> divide(std::uint64_t bytes);

  // Counts a stripe, or a piece of one, as outstanding. Returns what complete() needs.
  std::uint32_t add(std::size_t queue, std::uint64_t bytes) {
    const std::uint32_t load = encode_load(bytes);
    const std::uint32_t kib = decode_load(load);
    loads_[queue].outstanding += kib;
    outstanding_ += kib;
    return load;
  }
  void complete(std::size_t queue, std::uint32_t load) {
    const std::uint32_t kib = decode_load(load);
    loads_[queue].outstanding -= kib;
    loads_[queue].completed += kib;
    outstanding_ -= kib;
  }

 private:
  void divide_when_idle();
  void forget_measured_shares();

  std::vector<QpLoad> loads_;
  std::vector<Stripe> stripes_;
  std::vector<Stripe> idle_stripes_;  // with nothing outstanding: they change only with the shares
  std::uint64_t outstanding_ = 0;     // of all QPs, KiB
  bool was_idle_ = true;              // at the last message: what was completed since shows nothing
  std::uint32_t busy_messages_ = 0;   // since adapt_shares()
  std::uint32_t idle_messages_ = 0;   // since the shares were set
};

}  // namespace verbatim
