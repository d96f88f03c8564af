// The work requests of one QP that are not acknowledged, in the order of their posts, with the packets at which they
// end. Only sets with several lanes keep it. Of the data path's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "verbs/qp.h"

namespace verbatim::rma {

struct Request;

constexpr std::uint8_t packet_shift(ibv_mtu mtu) {
  return static_cast<std::uint8_t>(7 + mtu);  // IBV_MTU_256 is 1
}
constexpr std::uint32_t packets_of(std::uint64_t bytes, std::uint8_t shift) {
  return bytes == 0 ? 1 : static_cast<std::uint32_t>(((bytes - 1) >> shift) + 1);
}

class SentWork {
 public:
  enum class Kind : std::uint8_t { kPut, kSignal, kGet };
  struct Entry {
    Request* request = nullptr;
    std::uint64_t start = 0;  // offset of its bytes in the request
    Kind kind = Kind::kPut;
    bool last = false;      // work request of the request
    std::uint64_t end = 0;  // packets of the QP up to its end, counted from its first PSN; the last 24 bits are a PSN
  };

  // The send queue has `capacity` entries.
  explicit SentWork(std::size_t capacity) : entries_(capacity) {}

  // On another QP, or on this one connected anew: `psn` is that of the next packet.
  void start(std::uint32_t psn) {
    first_ = count_ = flushed_ = 0;
    acknowledged_ = posted_ = psn;
    ends_with_put_ = false;
  }

  std::size_t size() const { return count_; }
  const Entry& operator[](std::size_t i) const { return entries_[place(i)]; }
  // A packet carries at most the path MTU; a READ takes as many numbers as its response has packets.
  void add(Entry entry, std::uint32_t packets) {
    posted_ += packets;
    entry.end = posted_;
    if (entry.kind != Kind::kGet) ends_with_put_ = entry.kind == Kind::kPut;
    entries_[place(count_++)] = entry;
  }
  // A QP completes in order.
  void remove_first() {
    acknowledged_ = entries_[first_].end;
    first_ = place(1);
    --count_;
  }
  // One of them has completed with an error.
  void add_flushed() { ++flushed_; }
  bool all_flushed() const { return flushed_ == count_; }
  // The packets that the peer has executed if it expects this PSN: a device has less than 2^23 packets under way.
  std::uint64_t executed(std::uint32_t psn) const { return acknowledged_ + ((psn - acknowledged_) & kPsnMask); }
  std::uint64_t posted() const { return posted_; }
  // Whether the last one that writes is a put: a signal may come that is to be seen behind it.
  bool ends_with_put() const { return ends_with_put_; }

 private:
  std::size_t place(std::size_t i) const {
    const std::size_t at = first_ + i;
    return at < entries_.size() ? at : at - entries_.size();
  }

  std::vector<Entry> entries_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::size_t flushed_ = 0;
  std::uint64_t acknowledged_ = 0;  // packets
  std::uint64_t posted_ = 0;
  bool ends_with_put_ = false;
};

}  // namespace verbatim::rma
