// One end of a connection as verbs see it: completion queues and the QPs, walked from creation to RTS by
// the connector or acceptor. Owned by a comm; used by one thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "net/connect/qp_planner.h"
#include "net/diagnose/failure.h"
#include "verbs/device.h"
#include "verbs/handles.h"
#include "verbs/qp.h"
#include "wire/handshake.h"

namespace verbatim {

// Depths of one QP; the completion queue follows from them.
struct EndpointSizes {
  std::size_t qps = 1;
  QpCaps caps;
  std::uint32_t extra_completions = 0;  // of work that other QPs will send to the same queues, per device

  bool operator==(const EndpointSizes&) const = default;
};

// Where the QPs of an endpoint lie among those made in one order: net/qp_planner.h.
struct EndpointPlacement {
  PeerId peer;
  bool collective = false;
  QpOrder order = QpOrder::kNative;
  std::uint32_t block = 0;       // native: always 0
  std::uint32_t connection = 0;  // of this peer, so far
  std::uint32_t row = 0;
  std::uint32_t column = 0;
  std::uint32_t peers = 1;           // columns of the block
  std::uint32_t first_position = 0;  // native: of QP 0, among all

  std::uint32_t position(std::size_t qps, std::size_t qp) const {
    if (order == QpOrder::kNative) return first_position + static_cast<std::uint32_t>(qp);
    return static_cast<std::uint32_t>(row * qps + qp) * peers + column;
  }
};

struct EndpointQp {
  UniqueQp qp;
  std::uint32_t inline_bytes = 0;
  std::uint32_t send_wr = 0;  // depths that the device granted
  std::uint32_t recv_wr = 0;
  std::uint8_t device = 0;         // index into the endpoint's ports
  std::uint8_t remote_device = 0;  // index into the peer's devices
  bool ece = true;                 // options may be told: none were refused
  QpPath path;                     // after connect
};

class Endpoint {
 public:
  // Creates the queues on `ports` (1 to 8, QPs dealt out in turn) and moves the QPs to INIT.
  static Result<Endpoint> create(const std::vector<const Port*>& ports, const EndpointSizes& sizes,
                                 const Config& config);

  // Creates as many endpoints as `rows` adds up to, in its order. On each device their QPs have rising numbers in this
  // order: row by row, in a row the first QPs of all its endpoints, then the second ones.
  static Result<std::vector<Endpoint>> create_rows(const std::vector<const Port*>& ports, const EndpointSizes& sizes,
                                                   const Config& config, std::span<const std::size_t> rows);

  // Adds devices and QPs to what the peer is told.
  void add_to_hello(wire::Hello& hello) const;

  // Moves the QPs to RTR and RTS towards the peer's. `traffic_class` as Config has it, -1: none.
  Status connect(const wire::Hello& remote, const Config& config, int traffic_class);

  std::span<const Port* const> ports() const { return ports_; }
  // At least as many as ports, those at the same index being the port's.
  std::span<const UniqueCq> cqs() const { return cqs_; }
  std::span<EndpointQp> qps() { return qps_; }
  std::span<const EndpointQp> qps() const { return qps_; }

  const EndpointPlacement& placement() const { return placement_; }
  void set_placement(const EndpointPlacement& placement) { placement_ = placement; }

  // What the peer has told, after connect.
  const wire::Hello& remote() const { return remote_; }

  // "HOST (pid 4711)", after connect.
  std::string peer_name() const;

  // What one work request may carry, after connect: the smaller limit of both ends, a multiple of 128 where it can be.
  std::uint32_t max_message_bytes() const { return max_message_bytes_; }

  // "node1 mlx5_0:1 GID 3 ::ffff:10.0.0.1 QP 4711 to node2 ...", for messages. `host` is this one.
  std::string describe_path(std::size_t qp, const std::string& host) const;

  // What both ends, the port's events and the kernel's counters say of a QP's connection now. Reads files.
  PathFacts path_facts(std::size_t qp, const std::string& host) const;

 private:
  // A completion queue that all QPs of a device share, or one for each QP, which can then change places with another.
  enum class CqLayout : std::uint8_t { kPerDevice, kPerQp };

  Endpoint() = default;

  static Result<std::vector<Endpoint>> create_with_layout(const std::vector<const Port*>& ports,
                                                          const EndpointSizes& sizes, const Config& config,
                                                          std::span<const std::size_t> rows, CqLayout layout);
  Status refresh_ports(const std::vector<const Port*>& ports, const Config& config);
  Status create_cqs(const EndpointSizes& sizes, CqLayout layout);
  Status create_qp(std::size_t index, const EndpointSizes& sizes, const Config& config);
  PathFacts path(std::size_t qp, const std::string& host) const;

  std::vector<Port> current_ports_;  // the ports as they are now: an address or MTU may have changed since init
  std::vector<const Port*> ports_;
  std::vector<UniqueCq> cqs_;
  std::vector<EndpointQp> qps_;
  EndpointPlacement placement_;
  bool ece_ = false;  // options are exchanged
  wire::Hello remote_;
  std::uint32_t max_message_bytes_ = 0;
  unsigned timeout_ = 0;
  unsigned retry_count_ = 0;
  std::uint64_t connected_ns_ = 0;
  std::vector<std::shared_ptr<const PortCounters>> counters_;  // of the ports, when it was connected
};

inline QpUsage qp_usage(const Device& device) {
  return {.limit = device.attributes().max_qp, .in_use = device.live_qps().load(std::memory_order_relaxed)};
}

}  // namespace verbatim
