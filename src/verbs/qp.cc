#include "verbs/qp.h"

#include <algorithm>
#include <cerrno>
#include <string_view>

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

Status set_state(ibv_qp* qp, const Device& device, ibv_qp_state state, const char* operation) {
  ibv_qp_attr attributes = {};
  attributes.qp_state = state;
  return modify(qp, device, attributes, IBV_QP_STATE, operation);
}

// False: libibverbs or the device does not support it.
Result<bool> call_ece(const char* operation, int (*verb)(ibv_qp*, ibv_ece*), ibv_qp* qp, ibv_ece& ece) {
  if (verb == nullptr) return false;
  const Status done = check_errno(operation, verb(qp, &ece));
  if (done) return true;
  const int error = done.error().sys_errno;
  if (error == EOPNOTSUPP || error == EPROTONOSUPPORT || error == ENOSYS) return false;
  return done.error();
}

// In state RESET.
Result<RcQp> create_qp(const Device& device, ibv_cq* cq, const QpCaps& caps) {
  const ibv_device_attr& limits = device.attributes();
  for (std::uint32_t inline_bytes = caps.inline_bytes;;) {
    ibv_qp_init_attr wanted = {};
    wanted.send_cq = wanted.recv_cq = cq;
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap.max_send_wr = at_most(caps.send_wr, limits.max_qp_wr);
    wanted.cap.max_recv_wr = at_most(caps.recv_wr, limits.max_qp_wr);
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
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

Status to_init(ibv_qp* qp, const Port& port, const Config& config) {
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = config.pkey_index;
  attributes.port_num = port.port_num;
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (port.device->attributes().atomic_cap != IBV_ATOMIC_NONE) attributes.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
  return modify(qp, *port.device, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
                "ibv_modify_qp to INIT");
}

constexpr const char* kToRtr = "ibv_modify_qp to RTR";

}  // namespace

QpAddress qp_address(const Port& port, const ibv_qp* qp) {
  return {.qp_num = qp->qp_num,
          .lid = port.lid,
          .link_layer = port.link_layer,
          .grh_required = port.grh_required,
          .gid = port.gid.gid,
          .roce_version = port.gid.version};
}

Result<RcQp> make_qp(const Port& port, ibv_cq* cq, const QpCaps& caps, const Config& config) {
  Result<RcQp> made = create_qp(*port.device, cq, caps);
  if (!made) return made;
  if (const Status moved = to_init(made->qp.get(), port, config); !moved) return moved.error();
  return made;
}

Status make_again(ibv_qp* qp, const Port& port, const Config& config) {
  const Status moved = set_state(qp, *port.device, IBV_QPS_RESET, "ibv_modify_qp to RESET");
  return moved ? to_init(qp, port, config) : moved;
}

std::uint8_t responder_reads(const Device& device) {
  return static_cast<std::uint8_t>(std::clamp(device.attributes().max_qp_rd_atom, 0, kMaxOutstandingReads));
}

std::uint8_t initiator_reads(const Device& device) {
  return static_cast<std::uint8_t>(std::clamp(device.attributes().max_qp_init_rd_atom, 0, kMaxOutstandingReads));
}

bool atomics_exclude_each_other(std::span<const Port* const> ports) {
  constexpr std::uint32_t kRxe = 0xffffff;  // one lock for all its devices (Linux, rxe_mr.c: atomic_ops_lock)
  const auto all = [&](const auto& holds) { return std::ranges::all_of(ports, holds); };
  return all([&](const Port* port) { return port->device == ports.front()->device; }) ||
         all([](const Port* port) { return port->device->attributes().atomic_cap == IBV_ATOMIC_GLOB; }) ||
         all([](const Port* port) { return port->device->attributes().vendor_id == kRxe; });
}

Result<ConnectedQp> connect_qp(ibv_qp* qp, const Port& port, const QpConnection& connection, const Config& config) {
  const QpAddress& remote = connection.remote;
  ConnectedQp connected;
  if ((remote.link_layer == IBV_LINK_LAYER_ETHERNET) != port.is_roce()) {
    return Error{ErrorKind::kRemote, EPROTONOSUPPORT, "link layers of both ends"};
  }
  if (port.is_roce()) {
    const char* const mismatch = gid_mismatch(port.gid, {0, remote.gid, remote.roce_version});
    if (mismatch != nullptr) return Error{ErrorKind::kRemote, 0, mismatch, false, SetupStep::kMatchGids};
  }
  if (connection.ece) {
    ibv_ece options = *connection.ece;
    const Result<bool> accepted = call_ece("ibv_set_ece", port.device->verbs().set_ece, qp, options);
    if (!accepted) return accepted.error();
    connected.ece = *accepted;
  }
  ibv_qp_attr rtr = {};
  rtr.qp_state = IBV_QPS_RTR;
  rtr.path_mtu = connection.path.mtu;
  rtr.dest_qp_num = remote.qp_num;
  rtr.rq_psn = connection.psns.expected;
  rtr.max_dest_rd_atomic = responder_reads(*port.device);
  rtr.min_rnr_timer = kMinRnrTimer;
  rtr.ah_attr.dlid = destination_lid(port, remote);
  rtr.ah_attr.sl = connection.path.service_level;
  rtr.ah_attr.port_num = port.port_num;
  if (needs_grh(port, remote)) {
    rtr.ah_attr.is_global = 1;
    rtr.ah_attr.grh.dgid = remote.gid;
    rtr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(port.gid.index);
    rtr.ah_attr.grh.hop_limit = kHopLimit;
    rtr.ah_attr.grh.traffic_class = connection.path.traffic_class;
    rtr.ah_attr.grh.flow_label = connection.path.flow_label;
  }
  constexpr int kRtrMask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  if (const Status moved = modify(qp, *port.device, rtr, kRtrMask, kToRtr); !moved) return moved.error();
  ibv_qp_attr rts = {};
  rts.qp_state = IBV_QPS_RTS;
  rts.timeout = config.timeout;
  rts.retry_cnt = config.retry_count;
  rts.rnr_retry = kRnrRetryInfinite;
  rts.sq_psn = connection.psns.first;
  rts.max_rd_atomic = std::min(initiator_reads(*port.device), connection.peer_reads);
  constexpr int kRtsMask =
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  const Status moved = modify(qp, *port.device, rts, kRtsMask, "ibv_modify_qp to RTS");
  if (!moved) static_cast<void>(to_error(qp, *port.device));  // in RTR it would execute what the peer sends
  if (!moved) return moved.error();
  const Mlx5Capabilities& mlx5 = port.device->mlx5_capabilities();
  const std::size_t index = connection.lag_index.value_or(mlx5.num_lag_ports);
  if (mlx5.num_lag_ports < 2 || index >= mlx5.num_lag_ports || mlx5.modify_qp_lag_port == nullptr) return connected;
  const auto lag_port = static_cast<std::uint8_t>(index + 1);
  if (mlx5.modify_qp_lag_port(qp, lag_port) == 0) connected.lag_port = lag_port;  // else the firmware decides
  return connected;
}

bool is_unresolved(const Error& error) {
  return error.sys_errno == ETIMEDOUT && std::string_view(error.operation) == kToRtr;
}

QpConnection to_oneself(const Port& port, const ibv_qp* qp, std::uint32_t psn, const Config& config) {
  return {.remote = qp_address(port, qp),
          .psns = {psn, psn},
          .path = {.mtu = port.active_mtu,
                   .traffic_class = config.traffic_class.value_or(0),
                   .service_level = config.service_level.value_or(0)},
          .peer_reads = responder_reads(*port.device)};
}

std::uint64_t mix_bits(std::uint64_t number) {
  return 0x9e3779b97f4a7c15 * number;  // 2^64 divided by the golden ratio
}

std::uint32_t first_psn(std::uint64_t connection, std::uint32_t round) {
  return static_cast<std::uint32_t>(mix_bits(connection + round) >> 32) & kPsnMask;
}

// Eight and more labels follow one another from a multiple of 8: a hash of the kind that switches use, a CRC or an XOR
// of bits, then sends eight QPs over all of four paths. Fewer begin anywhere, so that the low bits of different
// connections differ.
std::uint32_t flow_label(std::uint64_t connection, std::size_t qp, std::size_t qps) {
  constexpr std::uint32_t kAlignment = 8;
  constexpr std::uint64_t kBases = ((1U << 14) - kFlowLabels) / kAlignment - 1;
  const std::uint64_t offset = qps < kAlignment ? (connection >> 32) % kAlignment : 0;
  return kAlignment * static_cast<std::uint32_t>(1 + connection % kBases) +
         static_cast<std::uint32_t>(offset + qp % kFlowLabels);
}

std::optional<std::size_t> lag_index(const Device& device, std::uint64_t connection, std::size_t qp, std::size_t qps) {
  const std::size_t ports = device.mlx5_capabilities().num_lag_ports;
  if (ports < 2 || qps < ports) return std::nullopt;
  return ((connection >> 48) % ports + qp) % ports;  // not by the bits of flow_label: a label takes any port
}

int post_empty_write(ibv_qp* qp, std::uint64_t wr_id, std::uint64_t address, std::uint32_t rkey) {
  ibv_send_wr work{};
  work.wr_id = wr_id;
  work.opcode = IBV_WR_RDMA_WRITE;
  work.send_flags = IBV_SEND_SIGNALED;
  work.wr.rdma.remote_addr = address;
  work.wr.rdma.rkey = rkey;
  return post_send(qp, work);
}

Status to_error(ibv_qp* qp, const Device& device) {
  return set_state(qp, device, IBV_QPS_ERR, "ibv_modify_qp to ERR");
}

Result<std::uint32_t> expected_psn(ibv_qp* qp, const Device& device) {
  ibv_qp_attr attributes = {};
  ibv_qp_init_attr unused = {};
  const Status queried = check_errno("ibv_query_qp", device.verbs().query_qp(qp, &attributes, IBV_QP_RQ_PSN, &unused));
  if (!queried) return queried.error();
  return attributes.rq_psn & kPsnMask;
}

Result<std::optional<ibv_ece>> query_ece(ibv_qp* qp, const Device& device) {
  ibv_ece ece = {};
  const Result<bool> queried = call_ece("ibv_query_ece", device.verbs().query_ece, qp, ece);
  if (!queried) return queried.error();
  return *queried ? std::optional(ece) : std::nullopt;
}

}  // namespace verbatim
