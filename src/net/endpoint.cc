#include "net/endpoint.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

// Also the granularity of LL128: a stripe or piece never cuts one of its lines.
constexpr std::uint32_t kPieceAlignBytes = 128;
// No more than this in one work request, so that a QP serves its neighbours in between.
constexpr std::uint32_t kMaxPieceBytes = 1U << 30;

std::uint32_t max_message_bytes(const Port& port) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(port.max_msg_bytes, kMaxPieceBytes));
}

QpAddress address_of(const wire::HelloDevice& device, const wire::HelloQp& qp) {
  QpAddress address;
  address.qp_num = qp.number;
  address.lid = device.lid;
  address.link_layer = device.link_layer;
  std::memcpy(address.gid.raw, device.gid.data(), sizeof address.gid.raw);
  return address;
}

std::string describe_end(const char* name, unsigned port, unsigned gid_index, const ibv_gid& gid, std::uint32_t qp) {
  char text[256];
  std::snprintf(text, sizeof text, "%s:%u GID %u %s QP %u", name, port, gid_index, to_string(gid).c_str(), qp);
  return text;
}

Result<UniqueCq> create_cq(const Port& port, std::size_t entries) {
  const Device& device = *port.device;
  const int limit = device.attributes().max_cqe;
  if (entries > static_cast<std::size_t>(std::max(limit, 0))) {
    VERBATIM_WARN(
        "%s: a connection needs a completion queue of %zu entries, the device allows %d: lower "
        "VERBATIM_QPS_PER_CONNECTION",
        port.name.c_str(), entries, limit);
    return Error{ErrorKind::kUsage, ENOMEM, "ibv_create_cq"};
  }
  const Verbs& verbs = device.verbs();
  return adopt("ibv_create_cq", verbs.create_cq(device.context(), static_cast<int>(entries), nullptr, nullptr, 0),
               verbs.destroy_cq);
}

}  // namespace

Result<Endpoint> Endpoint::create(std::vector<const Port*> ports, const EndpointSizes& sizes, const Config& config) {
  Endpoint endpoint;
  endpoint.ece_ = config.ece;
  endpoint.ports_ = std::move(ports);
  const std::size_t devices = endpoint.ports_.size();
  const std::size_t qps_per_device = (sizes.qps + devices - 1) / devices;
  for (const Port* port : endpoint.ports_) {
    const std::size_t work = qps_per_device * (std::size_t{sizes.caps.send_wr} + sizes.caps.recv_wr);
    Result<UniqueCq> cq = create_cq(*port, work + sizes.extra_completions);
    if (!cq) return cq.error();
    endpoint.cqs_.push_back(std::move(*cq));
  }
  for (std::size_t i = 0; i < sizes.qps; ++i) {
    const std::size_t device = i % devices;
    const Port& port = *endpoint.ports_[device];
    ibv_cq* cq = endpoint.cqs_[device].get();
    Result<RcQp> created = create_rc_qp(*port.device, cq, cq, sizes.caps);
    if (!created) return created.error();
    if (const Status moved = to_init(created->qp.get(), port, config.pkey_index); !moved) return moved.error();
    endpoint.qps_.push_back({std::move(created->qp), created->inline_bytes, created->send_wr, created->recv_wr,
                             static_cast<std::uint8_t>(device), 0, true});
  }
  return endpoint;
}

void Endpoint::describe(wire::Hello& hello) const {
  for (const Port* port : ports_) {
    wire::HelloDevice device;
    device.guid = port->guid;
    std::memcpy(device.gid.data(), port->gid.gid.raw, device.gid.size());
    device.max_message_bytes = verbatim::max_message_bytes(*port);
    device.lid = port->lid;
    device.link_layer = port->link_layer;
    device.mtu = static_cast<std::uint8_t>(port->active_mtu);
    device.port = port->port_num;
    device.gid_index = static_cast<std::uint8_t>(port->gid.index);
    device.responder_reads = responder_reads(*port->device);
    device.name = port->device->name();
    hello.devices.push_back(std::move(device));
  }
  for (const EndpointQp& end : qps_) {
    wire::HelloQp qp;
    qp.number = end.qp->qp_num;
    qp.device = end.device;
    if (ece_ && end.ece) {
      const Result<std::optional<ibv_ece>> ece = query_ece(end.qp.get(), *ports_[end.device]->device);
      qp.has_ece = ece && *ece;
      if (qp.has_ece) qp.ece = {(*ece)->vendor_id, (*ece)->options, (*ece)->comp_mask};
    }
    hello.qps.push_back(qp);
  }
}

Status Endpoint::connect(const wire::Hello& remote, const Config& config, int traffic_class) {
  if (remote.qps.size() != qps_.size()) return Error{ErrorKind::kRemote, 0, "hello with another number of QPs"};
  remote_ = remote;
  max_message_bytes_ = kMaxPieceBytes;
  for (std::size_t i = 0; i < qps_.size(); ++i) {
    EndpointQp& end = qps_[i];
    const wire::HelloQp& peer_qp = remote.qps[i];
    const wire::HelloDevice& peer = remote.devices[peer_qp.device];
    const Port& port = *ports_[end.device];
    end.remote_device = peer_qp.device;
    max_message_bytes_ = std::min({max_message_bytes_, verbatim::max_message_bytes(port), peer.max_message_bytes});
    end.ece = false;
    if (ece_ && peer_qp.has_ece) {
      const Result<bool> set = set_ece(end.qp.get(), *port.device, {peer_qp.ece[0], peer_qp.ece[1], peer_qp.ece[2]});
      if (!set) return set.error();
      end.ece = *set;
    }
    QpPath path;
    path.mtu = static_cast<ibv_mtu>(std::min<int>(port.active_mtu, peer.mtu));
    path.traffic_class =
        config.traffic_class.value_or(static_cast<std::uint8_t>(traffic_class < 0 ? 0 : traffic_class));
    path.service_level = config.service_level.value_or(0);
    if (const Status moved = to_rtr(end.qp.get(), port, address_of(peer, peer_qp), path); !moved) return moved;
    if (const Status moved = to_rts(end.qp.get(), port, config.timeout, config.retry_count, peer.responder_reads);
        !moved)
      return moved;
  }
  if (max_message_bytes_ > kPieceAlignBytes) max_message_bytes_ -= max_message_bytes_ % kPieceAlignBytes;
  return {};
}

std::string Endpoint::describe_path(std::size_t qp) const {
  const EndpointQp& end = qps_[qp];
  const Port& port = *ports_[end.device];
  std::string text = describe_end(port.name.c_str(), port.port_num, port.gid.index, port.gid.gid, end.qp->qp_num);
  if (remote_.qps.size() <= qp) return text;
  const wire::HelloDevice& peer = remote_.devices[end.remote_device];
  ibv_gid gid{};
  std::memcpy(gid.raw, peer.gid.data(), sizeof gid.raw);
  text += " to " + remote_.host + " ";
  text += describe_end(peer.name.c_str(), peer.port, peer.gid_index, gid, remote_.qps[qp].number);
  return text;
}

}  // namespace verbatim
