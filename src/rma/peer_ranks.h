// The other ranks of a communicator, and the collective calls over the channels to them: each rank sends one message
// to each other, and receives one. Owned by a coll comm.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "rma/failures.h"
#include "rma/handshake.h"
#include "wire/rma.h"

namespace verbatim::rma {

class PeerRanks {
 public:
  // `peers` in ring order from `rank`, see Handshake. A collective call waits `timeout_s` for the others; if that
  // fails, the communicator has failed.
  PeerRanks(std::vector<PeerRank> peers, std::uint32_t rank, unsigned timeout_s, Failures& failures);

  std::uint32_t ranks() const { return static_cast<std::uint32_t>(peers_.size()) + 1; }
  std::uint32_t rank() const { return rank_; }
  const std::vector<PeerRank>& all() const { return peers_; }
  // `rank` is not this one.
  const PeerRank& at(std::uint32_t rank) const { return peers_[(rank + ranks() - rank_) % ranks() - 1]; }

  // Sends `body(peer)` to each peer, where `peer` counts in ring order, and returns the bodies that they have sent, in
  // the same order. `failure`: why this rank cannot do what the call is about, sent in place of a body. One call at a
  // time. An error has been logged: another rank cannot, or the communicator has failed: then no further collective
  // call works. `failure` is the caller's to log.
  using Body = std::function<std::vector<std::uint8_t>(std::size_t peer)>;
  Result<std::vector<wire::RmaExchange>> exchange(wire::RmaCall call, const std::optional<std::string>& failure,
                                                  const Body& body);
  // The call has failed because of a peer.
  Error log_failure(const PeerRank& peer, wire::RmaCall call, const std::string& because) const;

  // Any thread: something has come over the channel of a peer, or its end, or the communicator has failed.
  void channel_changed(const PeerRank& peer) VERBATIM_EXCLUDES(mutex_);

  // Tells the others that this rank takes part in the next exchange with a later call.
  void announce_repeat(wire::RmaCall call);

  // Waits until all channels are over, or until the deadline.
  void wait_for_ends(std::uint64_t deadline_ns) const VERBATIM_EXCLUDES(mutex_);
  bool all_ended() const;

 private:
  // A collective call of this rank that waits for the messages of the others.
  struct Call {
    wire::RmaCall call;
    std::uint32_t sequence;
    std::vector<wire::RmaExchange> received;  // of peers_
    std::vector<bool> has;                    // likewise
    std::size_t count = 0;                    // of those that it has
    const PeerRank* lost = nullptr;           // nothing comes from it any more
    const PeerRank* differs = nullptr;        // it makes another call
  };

  void take(const PeerRank& peer) VERBATIM_REQUIRES(mutex_);
  // The call, or without one all channels.
  bool is_over() const VERBATIM_REQUIRES(mutex_);
  void wait(std::uint64_t deadline_ns) const VERBATIM_REQUIRES(mutex_);
  Error failed_already() const;
  Error fail_lost(const PeerRank& peer, wire::RmaCall call);
  Error fail_mismatch(const PeerRank& peer, wire::RmaCall call);
  Error fail_timeout(const Call& call);
  // "creating contexts (RMA, rank 1 of 2) failed"
  std::string failed_call(wire::RmaCall call) const;

  const std::vector<PeerRank> peers_;
  const std::uint32_t rank_;
  const unsigned timeout_s_;
  Failures& failures_;
  std::uint32_t next_sequence_ = 0;  // of the thread that makes collective calls
  mutable Mutex mutex_;
  mutable std::condition_variable_any changed_;
  std::optional<Call> call_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim::rma
