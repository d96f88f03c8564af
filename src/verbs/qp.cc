#include "verbs/qp.h"

#include <algorithm>
#include <cerrno>

#include "verbs/errors.h"

namespace verbatim {
namespace {

// 0.64 ms (table of the InfiniBand specification). The receiver posts receive work before the sender may send, so RNR
// NAKs are rare.
constexpr std::uint8_t kMinRnrTimer = 12;
constexpr std::uint8_t kRnrRetryInfinite = 7;
constexpr std::uint8_t kHopLimit = 255;
// READs are used for flushes only, and atomics for completions only: more of them at a time bring no bandwidth.
constexpr int kMaxOutstandingReads = 16;
// When create_qp fails with this many inline bytes or fewer, the next attempt is without inline data.
constexpr std::uint32_t kMinInlineBytes = 16;

std::uint8_t outstanding_reads(int device_limit) {
  return static_cast<std::uint8_t>(std::clamp(device_limit, 0, kMaxOutstandingReads));
}

std::uint32_t at_most(std::uint32_t wanted, int device_limit) {
  return device_limit > 0 ? std::min(wanted, static_cast<std::uint32_t>(device_limit)) : wanted;
}

// Within an InfiniBand subnet, packets are forwarded by LID. A GRH is needed by routers between subnets, and by ports
// that demand one.
bool needs_grh(const Port& port, const QpAddress& remote) {
  return port.is_roce() || remote.lid == 0 || port.grh_required || remote.grh_required ||
         subnet(port.gid.gid) != subnet(remote.gid);
}

// A LID is valid within its subnet. From another subnet the routers forward by the FLID of the GID; without an FLID the
// LID is used, as in NCCL.
std::uint16_t destination_lid(const Port& port, const QpAddress& remote) {
  const std::uint16_t routable = flid(remote.gid);
  return subnet(port.gid.gid) != subnet(remote.gid) && routable != 0 ? routable : remote.lid;
}

Status modify(ibv_qp* qp, const Device& device, ibv_qp_attr attributes, int mask, const char* operation) {
  return check_errno(operation, device.verbs().modify_qp(qp, &attributes, mask), SetupStep::kModifyQp);
}

bool means_not_supported(const Error& error) {
  return error.sys_errno == EOPNOTSUPP || error.sys_errno == EPROTONOSUPPORT || error.sys_errno == ENOSYS;
}

}  // namespace

QpAddress qp_address(const Port& port, const ibv_qp* qp) {
  return {.qp_num = qp->qp_num,
          .lid = port.lid,
          .link_layer = port.link_layer,
          .grh_required = port.grh_required,
          .gid = port.gid.gid,
          .roce_version = port.gid.version};
}

Result<RcQp> create_rc_qp(const Device& device, ibv_cq* send_cq, ibv_cq* recv_cq, const QpCaps& caps) {
  const ibv_device_attr& limits = device.attributes();
  for (std::uint32_t inline_bytes = caps.inline_bytes;;) {
    ibv_qp_init_attr wanted = {};
    wanted.send_cq = send_cq;
    wanted.recv_cq = recv_cq;
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap.max_send_wr = at_most(caps.send_wr, limits.max_qp_wr);
    wanted.cap.max_recv_wr = at_most(caps.recv_wr, limits.max_qp_wr);
    wanted.cap.max_send_sge = at_most(caps.send_sge, limits.max_sge);
    wanted.cap.max_recv_sge = at_most(caps.recv_sge, limits.max_sge);
    wanted.cap.max_inline_data = inline_bytes;
    Result<UniqueQp> qp = adopt("ibv_create_qp", device.verbs().create_qp(device.pd(), &wanted),
                                device.verbs().destroy_qp, SetupStep::kCreateQueue);
    if (qp) {
      qp->get_deleter().live_count = &device.live_qps();
      device.live_qps().fetch_add(1, std::memory_order_relaxed);
      return RcQp{*std::move(qp), std::min(caps.inline_bytes, wanted.cap.max_inline_data),
                  at_most(caps.send_wr, limits.max_qp_wr), at_most(caps.recv_wr, limits.max_qp_wr)};
    }
    if (inline_bytes == 0) return qp.error();
    // Verbs cannot query the maximum of inline bytes, so it is found by trying.
    inline_bytes = inline_bytes > kMinInlineBytes ? inline_bytes / 2 : 0;
  }
}

Status to_reset(ibv_qp* qp, const Device& device) {
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_RESET;
  return modify(qp, device, attributes, IBV_QP_STATE, "ibv_modify_qp to RESET");
}

Status to_init(ibv_qp* qp, const Port& port, std::uint16_t pkey_index) {
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = pkey_index;
  attributes.port_num = port.port_num;
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (port.device->attributes().atomic_cap != IBV_ATOMIC_NONE) attributes.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
  return modify(qp, *port.device, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
                "ibv_modify_qp to INIT");
}

std::uint8_t responder_reads(const Device& device) {
  return outstanding_reads(device.attributes().max_qp_rd_atom);
}

std::uint8_t initiator_reads(const Device& device) {
  return outstanding_reads(device.attributes().max_qp_init_rd_atom);
}

Status to_rtr(ibv_qp* qp, const Port& port, const QpAddress& remote, const QpPath& path, std::uint32_t psn) {
  if ((remote.link_layer == IBV_LINK_LAYER_ETHERNET) != port.is_roce()) {
    return Error{ErrorKind::kRemote, EPROTONOSUPPORT, "link layers of both ends"};
  }
  if (port.is_roce()) {
    const char* const mismatch = gid_mismatch(port.gid, {0, remote.gid, remote.roce_version});
    if (mismatch != nullptr) return Error{ErrorKind::kRemote, 0, mismatch, false, SetupStep::kMatchGids};
  }
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = path.mtu;
  attributes.dest_qp_num = remote.qp_num;
  attributes.rq_psn = psn;
  attributes.max_dest_rd_atomic = responder_reads(*port.device);
  attributes.min_rnr_timer = kMinRnrTimer;
  attributes.ah_attr.dlid = destination_lid(port, remote);
  attributes.ah_attr.sl = path.service_level;
  attributes.ah_attr.port_num = port.port_num;
  if (needs_grh(port, remote)) {
    attributes.ah_attr.is_global = 1;
    attributes.ah_attr.grh.dgid = remote.gid;
    attributes.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(port.gid.index);
    attributes.ah_attr.grh.hop_limit = kHopLimit;
    attributes.ah_attr.grh.traffic_class = path.traffic_class;
    attributes.ah_attr.grh.flow_label = path.flow_label;
  }
  return modify(qp, *port.device, attributes,
                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                "ibv_modify_qp to RTR");
}

Status to_rts(ibv_qp* qp, const Port& port, std::uint8_t timeout, std::uint8_t retry_count, std::uint8_t peer_reads,
              std::uint32_t psn) {
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = timeout;
  attributes.retry_cnt = retry_count;
  attributes.rnr_retry = kRnrRetryInfinite;
  attributes.sq_psn = psn;
  attributes.max_rd_atomic = std::min(initiator_reads(*port.device), peer_reads);
  return modify(
      qp, *port.device, attributes,
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
      "ibv_modify_qp to RTS");
}

std::uint8_t set_lag_port(ibv_qp* qp, const Device& device, std::size_t index) {
  const Mlx5Capabilities& mlx5 = device.mlx5_capabilities();
  if (mlx5.num_lag_ports < 2 || index >= mlx5.num_lag_ports || mlx5.modify_qp_lag_port == nullptr) return 0;
  const auto port = static_cast<std::uint8_t>(index + 1);
  return mlx5.modify_qp_lag_port(qp, port) == 0 ? port : std::uint8_t{0};
}

Status to_error(ibv_qp* qp, const Device& device) {
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_ERR;
  return modify(qp, device, attributes, IBV_QP_STATE, "ibv_modify_qp to ERR");
}

Result<std::uint32_t> expected_psn(ibv_qp* qp, const Device& device) {
  ibv_qp_attr attributes = {};
  ibv_qp_init_attr unused = {};
  const Status queried = check_errno("ibv_query_qp", device.verbs().query_qp(qp, &attributes, IBV_QP_RQ_PSN, &unused));
  if (!queried) return queried.error();
  return attributes.rq_psn & kPsnMask;
}

Result<std::optional<ibv_ece>> query_ece(ibv_qp* qp, const Device& device) {
  if (device.verbs().query_ece == nullptr) return std::optional<ibv_ece>();
  ibv_ece ece = {};
  const Status status = check_errno("ibv_query_ece", device.verbs().query_ece(qp, &ece));
  if (status) return std::optional<ibv_ece>(ece);
  if (means_not_supported(status.error())) return std::optional<ibv_ece>();
  return status.error();
}

Result<bool> set_ece(ibv_qp* qp, const Device& device, const ibv_ece& ece) {
  if (device.verbs().set_ece == nullptr) return false;
  ibv_ece wanted = ece;
  const Status status = check_errno("ibv_set_ece", device.verbs().set_ece(qp, &wanted));
  if (status) return true;
  if (means_not_supported(status.error())) return false;
  return status.error();
}

}  // namespace verbatim
