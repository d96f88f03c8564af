// The other ranks of a communicator, and the collective calls over the connections to them: each rank sends one message
// to each other, and receives one. Owned by a coll comm.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "rma/failures.h"
#include "rma/handshake.h"
#include "wire/rma.h"

namespace verbatim::rma {

class PeerRanks {
 public:
  // `peers` in ring order from `rank`, see Handshake. A collective call waits `timeout_s` for the others; if that
  // fails, the communicator has failed.
  // `received`: called when a collective call has read messages of a peer, which may be about a lane.
  using Received = std::function<void(const PeerRank&)>;
  PeerRanks(std::vector<PeerRank> peers, std::uint32_t rank, unsigned timeout_s, Failures& failures, Received received);

  std::uint32_t ranks() const { return static_cast<std::uint32_t>(peers_.size()) + 1; }
  std::uint32_t rank() const { return rank_; }
  const std::vector<PeerRank>& all() const { return peers_; }
  // `rank` is not this one.
  const PeerRank& at(std::uint32_t rank) const { return peers_[(rank + ranks() - rank_) % ranks() - 1]; }

  // Sends `body(peer)` to each peer, where `peer` counts in ring order, and returns what they have sent, in the same
  // order. One call at a time. An error has been logged, and the communicator has failed: no further collective call
  // works, and the other ranks learn why.
  using Body = std::function<std::vector<std::uint8_t>(std::size_t peer)>;
  Result<std::vector<wire::RmaExchange>> exchange(wire::RmaCall call, wire::RmaOutcome outcome, const Body& body);

  // Any thread: another one than that of the collective call has read messages.
  void wake() const;

  // Tells the others that this rank takes part in the next exchange with a later call.
  void announce_repeat(wire::RmaCall call);

  // Waits until all have ended their connections, or until the deadline.
  bool wait_for_ends(std::uint64_t deadline_ns) const;
  bool all_ended() const;

 private:
  // The message of one peer in a collective call.
  struct Awaited {
    const PeerRank* peer = nullptr;
    std::optional<wire::RmaExchange> received = std::nullopt;
    bool sent = false;  // this rank's
    bool ready = true;  // its socket has an event

    bool is_complete() const { return sent && received.has_value(); }
  };

  Status advance(Awaited& one, wire::RmaCall call, std::uint32_t sequence);
  void wait(std::vector<Awaited>& awaited, std::uint64_t deadline_ns) const;
  Error fail_lost(const PeerRank& peer, wire::RmaCall call);
  Error fail_mismatch(const PeerRank& peer, wire::RmaCall call);
  Error fail_timeout(std::size_t missing, const PeerRank& first, wire::RmaCall call);
  // "creating contexts (RMA, rank 1 of 2) failed: "
  std::string failed_call(wire::RmaCall call) const;

  const std::vector<PeerRank> peers_;
  const std::uint32_t rank_;
  const unsigned timeout_s_;
  Failures& failures_;
  const Received received_;
  const UniqueFd wake_;              // an eventfd; without one, a wait ends after a second
  std::uint32_t next_sequence_ = 0;  // of the thread that makes collective calls
};

}  // namespace verbatim::rma
