// Where ranks have several ports, they also have a TCP connection over each further network interface: the one over
// which the first connection runs may be that of a port that is lost. Collective, behind the exchange that says who has
// several ports. The rank that has accepted the first connection listens; the other one connects to all addresses at
// once. What is not connected within a second is left out.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "base/socket.h"
#include "base/socket_interface.h"
#include "base/unique_fd.h"
#include "rma/peer_ranks.h"
#include "wire/rma.h"

namespace verbatim::rma {

class FurtherConnections {
 public:
  // `interfaces`: of this process, the first is that of the first connections.
  FurtherConnections(PeerRanks& ranks, const Config& config, std::span<const SocketInterface> interfaces)
      : ranks_(ranks), config_(config), interfaces_(interfaces) {}

  // Adds connections to the channels. An error, which has been logged, is that of the exchange.
  Status run();

 private:
  using Token = std::array<std::uint8_t, 16>;
  struct Attempt {
    bool accepted = false;
    bool established = false;
    bool sent = false;
    std::size_t peer = 0;  // in ring order; of an accepted one: when the token has come
    UniqueFd socket = {};
    OutgoingMessage outgoing = {};
    Token incoming = {};
    std::size_t filled = 0;
  };

  void listen();
  void begin(std::size_t peer, const std::vector<wire::Address>& addresses);
  void accept();
  // True: both ends have the connection. An error: it is left out.
  Result<bool> advance(Attempt& attempt);
  // Whether the token that has come is that of a peer which connects to this rank.
  bool find_peer(Attempt& attempt) const;
  void advance_all();
  void wait(std::uint64_t deadline_ns);

  PeerRanks& ranks_;
  const Config& config_;
  const std::span<const SocketInterface> interfaces_;
  std::vector<UniqueFd> listeners_;
  std::vector<Token> tokens_;  // by peer in ring order
  std::vector<Attempt> attempts_;
  std::size_t expected_ = 0;  // connections of this rank, if all can be made
  std::size_t made_ = 0;
};

}  // namespace verbatim::rma
