// Reliable connected QPs: creation and the transitions INIT -> RTR -> RTS. These functions do not log: an Error has the
// verb and its errno, and the caller adds the peer.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <optional>

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
  std::uint32_t send_sge = 1;
  std::uint32_t recv_sge = 1;

  bool operator==(const QpCaps&) const = default;
};

struct RcQp {
  UniqueQp qp;
  std::uint32_t inline_bytes = 0;  // the device's value, but not more than requested
  std::uint32_t send_wr = 0;
  std::uint32_t recv_wr = 0;
};

// Packet sequence numbers have 24 bits.
inline constexpr std::uint32_t kPsnMask = 0xffffff;

// Creates a QP in state RESET. Sizes above the device's limits are reduced to the limits.
Result<RcQp> create_rc_qp(const Device& device, ibv_cq* send_cq, ibv_cq* recv_cq, const QpCaps& caps);

// The attributes of the path besides the peer's address. Both ends must use the same MTU.
struct QpPath {
  ibv_mtu mtu = IBV_MTU_1024;
  std::uint8_t traffic_class = 0;  // of the GRH: DSCP and ECN on RoCE
  std::uint8_t service_level = 0;
  std::uint32_t flow_label = 0;  // of the GRH, 20 bits; 0: the driver chooses
};

// Any state -> RESET: nothing may be outstanding.
Status to_reset(ibv_qp* qp, const Device& device);

// RESET -> INIT: from INIT on, receives can be posted. Allows remote writes and reads, and remote atomics if the device
// has them.
Status to_init(ibv_qp* qp, const Port& port, std::uint16_t pkey_index);

// The number of READs and atomics that a QP of the device can have outstanding, as responder and as initiator.
std::uint8_t responder_reads(const Device& device);
std::uint8_t initiator_reads(const Device& device);

// INIT -> RTR. A peer with another link layer, or on RoCE with a GID of another type, is refused without a verbs call.
// Of other failures sys_errno gives the cause of a failure (ETIMEDOUT, ENETUNREACH: no route or neighbour; EINVAL,
// ENODEV: GID index). `psn`: of the first packet that the peer
// sends.
Status to_rtr(ibv_qp* qp, const Port& port, const QpAddress& remote, const QpPath& path, std::uint32_t psn = 0);

// RTR -> RTS. The acknowledgement timeout is 4.096 us * 2^timeout; `peer_reads` is the peer's responder_reads.
// `psn`: of the first packet.
Status to_rts(ibv_qp* qp, const Port& port, std::uint8_t timeout, std::uint8_t retry_count, std::uint8_t peer_reads,
              std::uint32_t psn = 0);

// In RTS, where ports of an mlx5 device are a LAG (bonding): lets the QP send on the port with this index. Returns the
// port's number, index + 1; 0: there is no LAG, or the firmware distributes the packets itself.
std::uint8_t set_lag_port(ibv_qp* qp, const Device& device, std::size_t index);

// Any state -> ERR: outstanding work requests complete with a flush error.
Status to_error(ibv_qp* qp, const Device& device);

// The PSN of the packet that the QP, as responder, expects next: all before it have been executed. 24 bits. Drivers
// report it as rq_psn of ibv_query_qp (Linux: mlx5_ib_query_qp, next_rcv_psn; rxe_qp_to_attr, resp.psn).
Result<std::uint32_t> expected_psn(ibv_qp* qp, const Device& device);

// Enhanced connection establishment (ECE) options; nullopt if libibverbs or the device does not support them.
Result<std::optional<ibv_ece>> query_ece(ibv_qp* qp, const Device& device);
// To be called before INIT -> RTR. False if libibverbs or the device does not support ECE.
Result<bool> set_ece(ibv_qp* qp, const Device& device, const ibv_ece& ece);

}  // namespace verbatim
