// Makes the TCP connections between the ranks of a communicator: one for each pair. A rank connects to the next half of
// the ranks in ring order, all at once, and accepts the connections of the others at the same time. So the number of
// messages and the time at each rank are proportional to the number of ranks. Blocks until all are made, or until the
// deadline.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "base/socket.h"
#include "channel/dial.h"
#include "channel/listener.h"
#include "net/diagnose/diagnosis.h"
#include "rma/listen_comm.h"
#include "rma/peer_channel.h"
#include "wire/handle.h"
#include "wire/rma.h"

namespace verbatim {
struct ProcessParts;
}  // namespace verbatim

namespace verbatim::rma {

// Another rank, and the channel to it.
struct PeerRank {
  std::uint32_t rank = 0;
  std::string name;  // "rank 3 on node2 (pid 4711)"
  std::string host;
  std::unique_ptr<PeerChannel> channel;
};

// To how many ranks a rank connects, the next ones in ring order; the others connect to it. With an even number of
// ranks, the lower half connects to the ranks that are opposite in the ring.
constexpr std::uint32_t connects_to(std::uint32_t rank, std::uint32_t ranks) {
  return (ranks - 1) / 2 + (ranks % 2 == 0 && rank < ranks / 2 ? 1U : 0U);
}

class Handshake {
 public:
  // `handles`: of all ranks, that of this rank is the one of `listen`.
  Handshake(const Config& config, const ProcessParts& process, const PeerChannel::Process& channels, ListenComm& listen,
            const std::vector<wire::Handle>& handles, std::uint32_t rank);

  // The other ranks in ring order: rank + 1, rank + 2, .... An error has been logged.
  Result<std::vector<PeerRank>> run();

 private:
  // To a rank to which this one connects.
  struct Dialled {
    std::uint32_t rank = 0;
    wire::Key key{};  // of the hellos
    Dial dial;
    std::uint64_t attempt = 0;  // of its last hello
    wire::Mac hello_mac = {};   // likewise
    bool ready = true;          // its socket has an event, or its time has come
  };
  // A rank that has connected to this one.
  struct Accepted {
    wire::RmaHello peer;
    UniqueFd socket;
    OutgoingMessage welcome;
    wire::Key session;
  };

  std::uint32_t ranks() const { return static_cast<std::uint32_t>(handles_.size()); }
  std::uint32_t connects() const { return connects_to(rank_, ranks()); }
  bool expects(std::uint32_t rank) const;
  Status dial();
  Status accept();
  // A hello, or the reply to one. nullopt: it is not of a rank of this communicator.
  std::optional<wire::RmaHello> read(const IncomingMessage& message) const;
  wire::RmaHello hello(const wire::ListenId& listen, std::uint64_t attempt) const;
  void add_peer(const wire::RmaHello& peer, UniqueFd socket, const wire::ConnectionEnd& own, const wire::Key& session);
  // Until a connection can go on or a rank has connected.
  void wait(std::uint64_t now);
  Error log_failure(const Dialled& dialled, const Error& error) const;
  // The line is `what`, the device and this rank, `peer`, and the error.
  Error log(const char* what, const std::string& peer, const Error& error, Diagnosis diagnosis) const;
  Error log_timeout() const;
  std::string missing() const;

  const Config& config_;
  const ProcessParts& process_;
  const PeerChannel::Process& channels_;
  ListenComm& listen_;
  const std::vector<wire::Handle>& handles_;
  const std::uint32_t rank_;
  const std::uint64_t deadline_ns_;
  std::list<Dialled> dialled_;
  std::list<Accepted> accepted_;
  std::vector<PeerRank> peers_;  // by distance in the ring, less 1; without channel until it is made
  std::size_t made_ = 0;
};

}  // namespace verbatim::rma
