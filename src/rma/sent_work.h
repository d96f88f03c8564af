// The work requests of one QP that are not acknowledged, in the order of their posts, with the PSNs at which they end.
// Only sets with several lanes keep it. Of the data path's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "verbs/qp.h"

namespace verbatim::rma {

struct Request;

class SentWork {
 public:
  struct Entry {
    Request* request = nullptr;
    std::uint64_t start = 0;  // offset of its bytes in the request
    bool signal = false;
    bool last = false;  // work request of the request
    std::uint32_t end_psn = 0;
  };

  // The send queue has `capacity` entries.
  explicit SentWork(std::size_t capacity) : entries_(capacity) {}

  std::size_t size() const { return count_; }
  const Entry& operator[](std::size_t i) const { return entries_[(first_ + i) % entries_.size()]; }
  // A packet carries at most the path MTU; a READ takes as many numbers as its response has packets.
  void add(Entry entry, std::uint32_t packets) {
    posted_psn_ = (posted_psn_ + packets) & kPsnMask;
    entry.end_psn = posted_psn_;
    entries_[(first_ + count_++) % entries_.size()] = entry;
  }
  // A QP completes in order.
  void remove_first() {
    acknowledged_psn_ = entries_[first_].end_psn;
    first_ = (first_ + 1) % entries_.size();
    --count_;
  }
  // One of them has completed with an error.
  void add_flushed() { ++flushed_; }
  bool all_flushed() const { return flushed_ == count_; }
  // The first PSN of a QP is 0.
  std::uint32_t acknowledged_psn() const { return acknowledged_psn_; }
  std::uint32_t posted_psn() const { return posted_psn_; }
  void clear() {
    first_ = count_ = flushed_ = 0;
    acknowledged_psn_ = posted_psn_ = 0;
  }

 private:
  std::vector<Entry> entries_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::size_t flushed_ = 0;
  std::uint32_t acknowledged_psn_ = 0;
  std::uint32_t posted_psn_ = 0;
};

}  // namespace verbatim::rma
