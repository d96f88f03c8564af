// One end of a connection as verbs see it: a completion queue per device and the QPs, walked from creation to RTS by
// the connector or acceptor. Owned by a comm; used by one thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
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
};

struct EndpointQp {
  UniqueQp qp;
  std::uint32_t inline_bytes = 0;
  std::uint32_t send_wr = 0;  // depths that the device granted
  std::uint32_t recv_wr = 0;
  std::uint8_t device = 0;         // index into the endpoint's ports
  std::uint8_t remote_device = 0;  // index into the peer's devices
  bool ece = true;                 // options may be told: none were refused
};

class Endpoint {
 public:
  // Creates the queues on `ports` (1 to 8, QPs dealt out in turn) and moves the QPs to INIT.
  static Result<Endpoint> create(std::vector<const Port*> ports, const EndpointSizes& sizes, const Config& config);

  // Adds devices and QPs to what the peer is told.
  void describe(wire::Hello& hello) const;

  // Moves the QPs to RTR and RTS towards the peer's. `traffic_class` as Config has it, -1: none.
  Status connect(const wire::Hello& remote, const Config& config, int traffic_class);

  std::span<const Port* const> ports() const { return ports_; }
  std::span<const UniqueCq> cqs() const { return cqs_; }
  std::span<EndpointQp> qps() { return qps_; }
  std::span<const EndpointQp> qps() const { return qps_; }

  // What the peer has told, after connect.
  const wire::Hello& remote() const { return remote_; }

  // What one work request may carry, after connect: the smaller limit of both ends, a multiple of 128 where it can be.
  std::uint32_t max_message_bytes() const { return max_message_bytes_; }

  // "verbatim_mlx5_0:1 gid 3 ::ffff:10.0.0.1 QP 4711" of both ends, for messages.
  std::string describe_path(std::size_t qp) const;

 private:
  Endpoint() = default;

  std::vector<const Port*> ports_;
  std::vector<UniqueCq> cqs_;
  std::vector<EndpointQp> qps_;
  bool ece_ = false;  // options are exchanged
  wire::Hello remote_;
  std::uint32_t max_message_bytes_ = 0;
};

}  // namespace verbatim
