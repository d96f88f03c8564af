// The latencies that a comm measures with VERBATIM_LATENCY=1. The data path has two versions of isend, irecv and test,
// by a template parameter kTimed: a comm that measures nothing has no branch for it.
#pragma once

#include <array>
#include <cstdint>

#include "net/transfer/latency_histogram.h"
#include "wire/cts.h"

namespace verbatim {

// Of a send comm.
class SendLatencies {
 public:
  // isend was called at `ticks` and has accepted the message with this ring index.
  void accepted(std::uint32_t index, std::uint64_t ticks) { accepted_[index] = ticks; }
  // test reports it done.
  void done(std::uint32_t index) { sends_.add(read_ticks() - accepted_[index]); }

  LatencyStats read() const;

 private:
  std::array<std::uint64_t, wire::kRingEntries> accepted_ = {};
  LatencyHistogram sends_;
};

// Of a receive comm. A group counts once, with the ring index of its first member. Receives with optional completion
// are done when they are posted: they have no latency.
class ReceiveLatencies {
 public:
  // irecv cannot post the receive yet.
  void refused() {
    if (refused_since_ == 0) refused_since_ = read_ticks();
  }
  // Its CTS entry has been posted.
  void posted(std::uint32_t index) {
    const std::uint64_t now = read_ticks();
    posted_[index] = now;
    if (refused_since_ != 0) [[unlikely]]
      note_wait(index, now);
  }
  // The same of a receive with optional completion.
  void posted_optional() { refused_since_ = 0; }
  // test reports it done.
  void done(std::uint32_t index) {
    const std::uint64_t ticks = read_ticks() - posted_[index];
    if (waits_[index] != 0) [[unlikely]]
      return count_wait(index, ticks);
    receives_.add(ticks);
  }

  LatencyStats read() const;

 private:
  void note_wait(std::uint32_t index, std::uint64_t now) {
    waits_[index] = now - refused_since_;
    refused_since_ = 0;
  }
  void count_wait(std::uint32_t index, std::uint64_t ticks);

  std::uint64_t refused_since_ = 0;  // first irecv of a receive that is not posted yet
  std::array<std::uint64_t, wire::kRingEntries> posted_ = {};
  std::array<std::uint64_t, wire::kRingEntries> waits_ = {};  // from the first irecv to the post; 0: none
  LatencyHistogram receives_;                                 // that did not wait
  LatencyHistogram waited_;                                   // those that did, from the post on
  LatencyHistogram with_wait_;                                // and from the first irecv on
};

}  // namespace verbatim
