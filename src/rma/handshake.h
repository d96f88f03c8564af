// Makes the TCP connections between the ranks of a communicator: one for each pair. A rank connects to the next half of
// the ranks in ring order, all at once, and accepts the connections of the others at the same time. So the number of
// messages and the time at each rank are proportional to the number of ranks. Blocks until all are made, or until the
// deadline.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "base/socket.h"
#include "rma/channel.h"
#include "wire/handle.h"
#include "wire/rma.h"

namespace verbatim::rma {

// Another rank, and the connection to it.
struct PeerRank {
  std::uint32_t rank = 0;
  std::string name;  // "rank 3 on node2 (pid 4711)"
  std::string host;
  std::unique_ptr<Channel> channel;
};

// To how many ranks a rank connects, the next ones in ring order; the others connect to it. With an even number of
// ranks, the lower half connects to the ranks that are opposite in the ring.
constexpr std::uint32_t connects_to(std::uint32_t rank, std::uint32_t ranks) {
  return (ranks - 1) / 2 + (ranks % 2 == 0 && rank < ranks / 2 ? 1U : 0U);
}

struct HandshakeSettings {
  const Config& config;
  const sockaddr_storage& local_address;
  std::string side_channel_name;  // for messages
  std::string host_name;
  std::string device;  // for messages
};

class Handshake {
 public:
  // `handles`: of all ranks, that of this rank is the one of `listener`.
  Handshake(const HandshakeSettings& settings, const UniqueFd& listener, const std::vector<wire::Handle>& handles,
            std::uint32_t rank);

  // The other ranks in ring order: rank + 1, rank + 2, .... An error has been logged.
  Result<std::vector<PeerRank>> run();

 private:
  // A TCP connection that this rank has begun, or that it has accepted.
  struct Attempt {
    enum class State : std::uint8_t { kWait, kConnect, kSendHello, kReceiveWelcome, kSendWelcome };
    State state = State::kWait;
    bool accepted = false;
    std::uint64_t begun_ns = 0;  // when the TCP connect began, or when it was accepted
    bool is_late = false;        // its hello was sent long after that
    bool ready = true;           // its socket can be read or written, or its time has come
    std::uint32_t rank = 0;      // of an accepted connection: known with its hello
    UniqueFd socket = {};
    OutgoingMessage outgoing = {};
    std::vector<std::uint8_t> incoming = {};
    std::size_t filled = 0;
    std::uint64_t next_ns = 0;  // kWait: when to connect
    std::uint64_t pause_ns = 0;
    wire::RmaHello peer = {};
  };

  std::uint32_t ranks() const { return static_cast<std::uint32_t>(handles_.size()); }
  std::uint32_t connects() const { return connects_to(rank_, ranks()); }
  bool expects(std::uint32_t rank) const;
  Status accept();
  // Whether a further connection must wait in the backlog: the others have not had their time.
  bool is_full(std::uint64_t now) const;
  void read_pending(std::uint64_t now);
  // A rank whose hello is late connects again after the reset.
  void drop(std::list<Attempt>::iterator pending);
  // True: the connection is made.
  Result<bool> advance(Attempt& attempt);
  Result<bool> begin(Attempt& attempt);
  Result<bool> connected(Attempt& attempt);
  Result<bool> receive_hello(Attempt& attempt);
  Result<bool> receive(Attempt& attempt, wire::RmaMessageType type);
  wire::RmaHello hello_for(std::uint32_t rank) const;
  // Whether to go on without an accepted connection, or to try again.
  bool survives(Attempt& attempt, const Error& error, std::uint64_t now);
  void add_peer(Attempt& attempt);
  // Until an attempt is ready or a connection can be accepted.
  void wait(std::uint64_t now);
  Error log_failure(const Attempt& attempt, const Error& error) const;
  Error log_timeout() const;
  std::string missing() const;

  const HandshakeSettings settings_;
  const UniqueFd& listener_;
  const std::vector<wire::Handle>& handles_;
  const std::uint32_t rank_;
  const std::uint64_t deadline_ns_;
  std::list<Attempt> attempts_;
  std::list<Attempt> pending_;   // accepted ones without a complete hello, the oldest first
  std::vector<PeerRank> peers_;  // by distance in the ring, less 1; without channel until it is made
  std::size_t made_ = 0;
  bool acceptable_ = true;
};

}  // namespace verbatim::rma
