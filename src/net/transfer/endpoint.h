// The verbs objects at one end of a connection: completion queues and QPs, from creation to RTS. Created by the
// endpoint pool, connected by the connector or the listen comm, then owned by a comm. One thread at a time uses it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "net/diagnose/failure.h"
#include "net/transfer/verb_budget.h"
#include "verbs/device.h"
#include "verbs/handles.h"
#include "verbs/qp.h"
#include "wire/handshake.h"
#include "wire/notice.h"

namespace verbatim {

// Number and depths of the QPs. The sizes of the completion queues follow from them.
struct EndpointSizes {
  std::size_t qps = 1;
  QpCaps caps;
  std::uint32_t extra_completions = 0;  // per completion queue, for work of QPs that are not the endpoint's

  bool operator==(const EndpointSizes&) const = default;
};

// Position of the QPs in the order of net/connect/endpoint_pool.h, for VERBATIM_QP_DUMP.
struct EndpointPlacement {
  bool collective = false;
  QpOrder order = QpOrder::kNative;
  std::uint32_t connection = 0;  // number of earlier connections to the same peer
  std::uint32_t block = 0;
  std::uint32_t peers = 1;           // of the block; native: 1
  std::uint32_t first_position = 0;  // of QP 0, in the block; native: among all native QPs

  std::uint32_t position(std::size_t qp) const { return first_position + static_cast<std::uint32_t>(qp) * peers; }
};

// Of a lane that came back. Its other end, and other lanes of the same ports, may have other ones.
struct LaneGids {
  GidEntry own;
  std::array<std::uint8_t, 16> remote = {};
  std::uint16_t remote_index = 0;
};

// What stays when a lane comes back.
struct QpPlace {
  std::uint8_t device = 0;         // index into the endpoint's ports
  std::uint8_t remote_device = 0;  // index into the peer's devices
  bool ece = true;                 // after connect: whether the device accepted the peer's options
  QpPath path = {};                // after connect
  std::uint8_t lag_port = 0;       // after connect; 0: no LAG
};

struct EndpointQp : RcQp, QpPlace {
  std::unique_ptr<LaneGids> gids;  // nullptr: those of the ports, as they were at connect
};

class Endpoint {
 public:
  // Creates an endpoint at once; EndpointBlock does it in slices.
  static Result<Endpoint> create(const std::vector<const Port*>& ports, const EndpointSizes& sizes,
                                 const Config& config);

  // Adds devices and QPs to the hello for the peer.
  void add_to_hello(wire::Hello& hello) const;

  // Connects the QPs to those of `remote`: RTR, then RTS. `traffic_class` applies unless the configuration sets one;
  // -1: none. False: not yet; the next call with the same arguments continues. On RoCE the kernel resolves the peer's
  // address in ibv_modify_qp to RTR, and returns ETIMEDOUT when it has got no answer for a second: then the budget is
  // exhausted.
  Result<bool> connect(const wire::Hello& remote, const Config& config, int traffic_class, VerbBudget& budget);
  // The error that connect() waits out: the peer's address does not resolve.
  const std::optional<Error>& unresolved() const { return unresolved_; }
  // Whether connect() has waited out more than one.
  bool resolve_repeated() const;
  // After connect: see qp_shares in lanes.h. QPs in `left_out` get 0, the others what they can carry without those.
  std::vector<std::uint32_t> qp_shares(const std::vector<bool>& left_out = {}) const;
  // Pairs of ports, one at each end, that have QPs. After connect.
  std::size_t lanes() const;
  // Replaces QPs by new ones, which are connected to those of `remote`.
  void exchange_qps(std::span<const std::uint8_t> indexes, std::vector<EndpointQp>& made,
                    const wire::LaneAddress& remote);
  // Of a QP: the addresses of both ends.
  const GidEntry& gid(std::size_t qp) const {
    const EndpointQp& end = qps_[qp];
    return end.gids != nullptr ? end.gids->own : ports_[end.device]->gid;
  }
  const std::array<std::uint8_t, 16>& remote_gid(std::size_t qp) const {
    const EndpointQp& end = qps_[qp];
    return end.gids != nullptr ? end.gids->remote : remote_.devices[end.remote_device].gid;
  }
  // Of the QP's local port, since the connection was made.
  bool link_was_down(std::size_t qp) const;
  // The QP that connect() moves next; 0 when all are connected.
  std::size_t next_qp() const { return connected_qps_ % qps_.size(); }

  std::span<const Port* const> ports() const { return ports_; }
  // The first QP on this port, which has the index of the port.
  std::size_t qp_on_port(std::size_t port) const { return port < qps_.size() ? port : 0; }
  // One for each port, or one for each QP and at least one for each port; the CQ at the index of a port belongs to it.
  std::span<const UniqueCq> cqs() const { return cqs_; }
  std::span<EndpointQp> qps() { return qps_; }
  std::span<const EndpointQp> qps() const { return qps_; }

  const EndpointPlacement& placement() const { return placement_; }
  void set_placement(const EndpointPlacement& placement) { placement_ = placement; }

  // The peer's hello, after connect.
  const wire::Hello& remote() const { return remote_; }

  // "HOST (pid 4711)", after connect.
  const std::string& peer_name() const { return peer_name_; }

  // Limit of one work request, after connect: the smaller limit of both ends, rounded down to a multiple of 128 if it
  // is more than 128.
  std::uint32_t max_message_bytes() const { return max_message_bytes_; }

  // "node1 mlx5_0:1 GID 3 ::ffff:10.0.0.1 QP 4711 to node2 ...", for messages. `host` is the local host's name.
  std::string describe_path(std::size_t qp, const std::string& host) const;

  // The current facts of a QP's connection: both ends, the port's events, the kernel's counters. Reads files.
  PathFacts path_facts(std::size_t qp, const std::string& host) const;

 private:
  friend class EndpointBlock;

  Endpoint() = default;

  void wait_for_neighbour(const Error& error);
  PathFacts path(std::size_t qp, const std::string& host) const;

  // Copies that are up to date, for all endpoints of a block: GID and MTU may have changed since init.
  std::shared_ptr<const std::vector<Port>> current_ports_;
  std::vector<const Port*> ports_;
  std::vector<UniqueCq> cqs_;
  std::vector<EndpointQp> qps_;
  EndpointPlacement placement_;
  bool ece_ = false;  // the configuration allows the exchange of ECE options
  wire::Hello remote_;
  std::string peer_name_;
  std::uint32_t max_message_bytes_ = 0;
  std::size_t connected_qps_ = 0;
  std::optional<Error> unresolved_;
  std::uint64_t resolve_ns_ = 0;  // time of the next attempt
  std::uint64_t resolve_pause_ns_ = 0;
  unsigned timeout_ = 0;
  unsigned retry_count_ = 0;
  std::uint64_t connected_ns_ = 0;
  std::vector<std::shared_ptr<const PortCounters>> counters_;  // of the ports, at connect
};

// What this end tells of a port, and of a QP with its ECE options if `ece`.
wire::HelloDevice hello_of(const Port& port);
wire::HelloQp hello_of(ibv_qp* qp, const Device& device, bool ece);
// What it makes of the peer's: the address without the QP, and the path without the flow label. `traffic_class` applies
// unless the configuration sets one; -1: none.
QpAddress address_of(const wire::HelloDevice& peer, RoceVersion version);
std::optional<ibv_ece> ece_of(const wire::HelloQp& peer);
QpPath path_to(const wire::HelloDevice& peer, const Port& port, const Config& config, int traffic_class);
// One end of a path, for messages: this one, and the peer's without the QP.
PathEnd path_end(const std::string& host, const Port& port, const GidEntry& gid, std::uint32_t qp);
PathEnd path_end(const std::string& host, const wire::HelloDevice& peer, RoceVersion version);
// What has happened to the port of a path since it was connected: asks the device. `before`: the counters then.
void add_port_facts(PathFacts& facts, const Port& port, const GidEntry& gid, const PortCounters& before,
                    std::uint64_t connected_ns);
// Limit of one work request.
std::uint32_t max_message_bytes(const Port& port);

// Of the device that has the fewest QPs left.
QpUsage qp_usage(std::span<const Port* const> ports);

}  // namespace verbatim
