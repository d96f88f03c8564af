// Reliable connected queue pairs: creation and the walk INIT -> RTR -> RTS. Nothing here logs: an Error carries the
// verb and its errno, and the caller knows the peer.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <optional>

#include "base/result.h"
#include "verbs/device.h"
#include "verbs/handles.h"

namespace verbatim {

// Where a QP is reached: what each side tells the other.
struct QpAddress {
  std::uint32_t qp_num = 0;
  std::uint16_t lid = 0;
  std::uint8_t link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  ibv_gid gid = {};
};

QpAddress qp_address(const Port& port, const ibv_qp* qp);

struct QpCaps {
  std::uint32_t send_wr = 1;
  std::uint32_t recv_wr = 0;
  std::uint32_t inline_bytes = 0;  // wanted; a device that refuses gets the QP without
  std::uint32_t send_sge = 1;
  std::uint32_t recv_sge = 1;

  bool operator==(const QpCaps&) const = default;
};

struct RcQp {
  UniqueQp qp;
  std::uint32_t inline_bytes = 0;  // what the device granted, at most what was asked for
  std::uint32_t send_wr = 0;       // likewise
  std::uint32_t recv_wr = 0;
};

// Depths beyond the device's limits are cut to them. The QP is in RESET.
Result<RcQp> create_rc_qp(const Device& device, ibv_cq* send_cq, ibv_cq* recv_cq, const QpCaps& caps);

// What a path needs beside the peer's address; both ends must agree on the MTU.
struct QpPath {
  ibv_mtu mtu = IBV_MTU_1024;
  std::uint8_t traffic_class = 0;  // of the GRH: DSCP and ECN on RoCE
  std::uint8_t service_level = 0;
};

// RESET -> INIT: from here receives may be posted. Peers may write and read, and use atomics where the device has them.
Status to_init(ibv_qp* qp, const Port& port, std::uint16_t pkey_index);

// READs and atomics at a time that a QP of the device answers, and how many it may have under way itself.
std::uint8_t responder_reads(const Device& device);
std::uint8_t initiator_reads(const Device& device);

// INIT -> RTR. sys_errno tells why a peer is out of reach (ETIMEDOUT, ENETUNREACH: no route or neighbour; EINVAL,
// ENODEV: GID index).
Status to_rtr(ibv_qp* qp, const Port& port, const QpAddress& remote, const QpPath& path);

// RTR -> RTS. `timeout` is 4.096 us * 2^timeout; `peer_reads` is what the other end answers at a time.
Status to_rts(ibv_qp* qp, const Port& port, std::uint8_t timeout, std::uint8_t retry_count, std::uint8_t peer_reads);

// Any state -> ERR: outstanding work is flushed.
Status to_error(ibv_qp* qp, const Device& device);

// Enhanced connection establishment options; nullopt where library or device has none.
Result<std::optional<ibv_ece>> query_ece(ibv_qp* qp, const Device& device);
// Before INIT -> RTR. false where library or device has none.
Result<bool> set_ece(ibv_qp* qp, const Device& device, const ibv_ece& ece);

}  // namespace verbatim
