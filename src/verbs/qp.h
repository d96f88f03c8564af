// Reliable connected QPs: the only place that makes and connects them. These functions do not log: an Error has the
// verb and its errno, and the caller adds the peer.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/config.h"
#include "base/result.h"
#include "verbs/device.h"
#include "verbs/handles.h"

namespace verbatim {

// The address of a QP, exchanged in the handshake.
struct QpAddress {
  std::uint32_t qp_num = 0;
  std::uint16_t lid = 0;
  std::uint8_t link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  bool grh_required = false;  // Port::grh_required
  ibv_gid gid = {};
  RoceVersion roce_version = RoceVersion::kUnknown;
};

QpAddress qp_address(const Port& port, const ibv_qp* qp);

struct QpCaps {
  std::uint32_t send_wr = 1;
  std::uint32_t recv_wr = 0;
  std::uint32_t inline_bytes = 0;  // as many as the device supports, up to this

  bool operator==(const QpCaps&) const = default;
};

struct RcQp {
  UniqueQp qp;
  std::uint32_t inline_bytes = 0;  // the device's value, but not more than requested
  std::uint32_t send_wr = 0;
  std::uint32_t recv_wr = 0;
};

// Return what ibv_post_send returns.
inline int post_send(ibv_qp* qp, ibv_send_wr& work) {
  ibv_send_wr* refused;
  return ibv_post_send(qp, &work, &refused);
}
// A signalled WRITE of 0 bytes: its completion shows whether the peer's NIC answers.
int post_empty_write(ibv_qp* qp, std::uint64_t wr_id, std::uint64_t address, std::uint32_t rkey);

// Packet sequence numbers have 24 bits.
inline constexpr std::uint32_t kPsnMask = 0xffffff;

// Creates a QP and moves it to INIT: from then on, receives can be posted. Sizes above the device's limits are reduced
// to the limits. Allows remote writes and reads, and remote atomics if the device has them.
Result<RcQp> make_qp(const Port& port, ibv_cq* cq, const QpCaps& caps, const Config& config);
// Any state -> RESET -> INIT: nothing may be outstanding.
Status make_again(ibv_qp* qp, const Port& port, const Config& config);

// The attributes of the path besides the peer's address. Both ends must use the same MTU.
struct QpPath {
  ibv_mtu mtu = IBV_MTU_1024;
  std::uint8_t traffic_class = 0;  // of the GRH: DSCP and ECN on RoCE
  std::uint8_t service_level = 0;
  std::uint32_t flow_label = 0;  // of the GRH, 20 bits; 0: the driver chooses
};

// The number of READs and atomics that a QP of the device can have outstanding, as responder and as initiator.
std::uint8_t responder_reads(const Device& device);
std::uint8_t initiator_reads(const Device& device);
// Whether one word may be changed by atomics over any of the ports at the same time. IBV_ATOMIC_HCA promises it only
// for those of one device.
bool atomics_exclude_each_other(std::span<const Port* const> ports);

struct QpPsns {
  std::uint32_t expected = 0;  // of the peer's first packet
  std::uint32_t first = 0;     // of this end's
};

struct QpConnection {
  QpAddress remote = {};
  QpPsns psns = {};
  QpPath path = {};
  std::uint8_t peer_reads = 0;                // the peer's responder_reads
  std::optional<ibv_ece> ece = {};            // the peer's options, if both ends use ECE
  std::optional<std::size_t> lag_index = {};  // see lag_index(); nullopt: the driver decides
};
struct ConnectedQp {
  bool ece = false;           // the device has accepted the peer's options
  std::uint8_t lag_port = 0;  // the number of the port, lag_index + 1; 0: the driver or the firmware decides
};

// INIT -> RTR -> RTS, or ERR if RTS is refused. A peer with another link layer, or on RoCE with a GID of another type,
// is refused without a verbs call. Of other failures sys_errno gives the cause (ETIMEDOUT, ENETUNREACH: no route or
// neighbour; EINVAL, ENODEV: GID index).
Result<ConnectedQp> connect_qp(ibv_qp* qp, const Port& port, const QpConnection& connection, const Config& config);
// On RoCE the kernel resolves the peer's address in ibv_modify_qp to RTR, and fails when it has got no answer for a
// second. The same call may succeed later.
bool is_unresolved(const Error& error);

// For what a device does with its own memory: the connection of a QP with itself, from this PSN on.
QpConnection to_oneself(const Port& port, const ibv_qp* qp, std::uint32_t psn, const Config& config);

// A number whose high bits depend on all bits of `number`, to take the place of a random one.
std::uint64_t mix_bits(std::uint64_t number);

// The PSN of the first packet of both ends of a connection with the random number `connection`, which both have: who
// sees no packet must guess 24 bits to forge one. `round`: how often its QPs have been made anew.
std::uint32_t first_psn(std::uint64_t connection, std::uint32_t round);

// Flow labels of one connection; those of further QPs repeat.
inline constexpr std::size_t kFlowLabels = 128;
// The GRH flow label of QP `qp` of `qps` of a connection with the random number `connection`. Devices and the kernel
// derive the UDP source port of RoCE from it (its low 14 bits; 0 leaves the choice to the driver), and switches choose
// the path by the port.
std::uint32_t flow_label(std::uint64_t connection, std::size_t qp, std::size_t qps);
// Which port of a LAG (ports of an mlx5 device that are bonded) QP `qp` of `qps` sends on, as an index. nullopt: there
// is no LAG, or the driver decides. It gives the QPs that it creates to the ports in turn, so this is needed only where
// a connection has a QP for each port.
std::optional<std::size_t> lag_index(const Device& device, std::uint64_t connection, std::size_t qp, std::size_t qps);

// Any state -> ERR: outstanding work requests complete with a flush error.
Status to_error(ibv_qp* qp, const Device& device);

// The PSN of the packet that the QP, as responder, expects next: all before it have been executed. 24 bits. It is
// rq_psn of ibv_query_qp, where the driver reports that (Linux: mlx5_ib_query_qp, next_rcv_psn; rxe_qp_to_attr,
// resp.psn): see rma/device_tests.h.
Result<std::uint32_t> expected_psn(ibv_qp* qp, const Device& device);

// Enhanced connection establishment (ECE) options; nullopt if libibverbs or the device does not support them.
Result<std::optional<ibv_ece>> query_ece(ibv_qp* qp, const Device& device);

}  // namespace verbatim
