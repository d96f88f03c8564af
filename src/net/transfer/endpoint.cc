#include "net/transfer/endpoint.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <set>
#include <utility>

#include "base/clock.h"
#include "net/transfer/endpoint_block.h"
#include "net/transfer/lanes.h"

namespace verbatim {
namespace {

// The size of an LL128 line: no stripe or piece cuts a line.
constexpr std::uint32_t kPieceAlignBytes = 128;
// Larger work requests are split, so that the NIC serves other QPs between the pieces.
constexpr std::uint32_t kMaxPieceBytes = 1U << 30;
constexpr std::size_t kVerbsToConnectQp = 2;
// Pauses between attempts to resolve the peer's address: each attempt sends a few ARP or ND requests.
constexpr std::uint64_t kFirstResolvePauseNs = 20 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kMaxResolvePauseNs = kNanosecondsPerSecond;

std::uint32_t max_message_bytes(const Port& port) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(port.max_msg_bytes, kMaxPieceBytes));
}

// The type of the GIDs of all `ports`, as a bit of Hello::capabilities.
std::uint32_t roce_capability(std::span<const Port* const> ports) {
  const RoceVersion version = ports.front()->gid.version;
  for (const Port* port : ports) {
    if (!port->is_roce() || port->gid.version != version) return 0;
  }
  return version == RoceVersion::kV2 ? wire::kRoceV2 : version == RoceVersion::kV1 ? wire::kRoceV1 : 0U;
}

RoceVersion roce_version(const wire::Hello& hello) {
  if ((hello.capabilities & wire::kRoceV2) != 0) return RoceVersion::kV2;
  return (hello.capabilities & wire::kRoceV1) != 0 ? RoceVersion::kV1 : RoceVersion::kUnknown;
}

QpAddress address_of(const wire::Hello& hello, const wire::HelloDevice& device, const wire::HelloQp& qp) {
  QpAddress address;
  address.qp_num = qp.number;
  address.lid = device.lid;
  address.link_layer = device.link_layer;
  address.grh_required = device.grh_required;
  std::memcpy(address.gid.raw, device.gid.data(), sizeof address.gid.raw);
  address.roce_version = roce_version(hello);
  return address;
}

// NCCL uses the traffic class of a communicator as its service level too, of which devices take the low four bits.
std::uint8_t service_level_of(int traffic_class) {
  return static_cast<std::uint8_t>(traffic_class < 0 ? 0 : traffic_class & 0xf);
}

// The GRH flow label of QP `qp` of `qps`, equal at both ends. Devices and the kernel derive the UDP source port of RoCE
// from it (its low 14 bits; 0 leaves the choice to the driver), and switches choose the path by the port. Eight and
// more labels follow one another from a multiple of 8: a hash of the kind that switches use, a CRC or an XOR of bits,
// then sends eight QPs over all of four paths. Fewer begin anywhere, so that the low bits of different connections
// differ.
std::uint32_t flow_label(std::uint64_t attempt, std::size_t qp, std::size_t qps) {
  constexpr std::uint32_t kAlignment = 8;
  constexpr std::uint64_t kBases = ((1U << 14) - wire::kMaxQps) / kAlignment - 1;
  const std::uint64_t offset = qps < kAlignment ? (attempt >> 32) % kAlignment : 0;
  return kAlignment * static_cast<std::uint32_t>(1 + attempt % kBases) + static_cast<std::uint32_t>(offset + qp);
}

// Which port of a LAG QP `qp` of `qps` uses, as an index. nullopt: the driver decides. It gives the QPs that it creates
// to the ports in turn, so this is needed only where a connection has a QP for each port.
std::optional<std::size_t> lag_port(const Device& device, std::uint64_t attempt, std::size_t qp, std::size_t qps) {
  const std::size_t ports = device.mlx5_capabilities().num_lag_ports;
  if (ports < 2 || qps < ports) return std::nullopt;
  return (attempt % ports + qp) % ports;
}

}  // namespace

QpUsage qp_usage(std::span<const Port* const> ports) {
  QpUsage fullest;
  const auto left = [](const QpUsage& usage) { return usage.limit - static_cast<std::int64_t>(usage.in_use); };
  for (const Port* port : ports) {
    const Device& device = *port->device;
    const QpUsage usage{.limit = device.attributes().max_qp,
                        .in_use = device.live_qps().load(std::memory_order_relaxed)};
    if (port == ports.front() || left(usage) < left(fullest)) fullest = usage;
  }
  return fullest;
}

Result<Endpoint> Endpoint::create(const std::vector<const Port*>& ports, const EndpointSizes& sizes,
                                  const Config& config) {
  const std::size_t one[] = {1};
  EndpointBlock block(ports, sizes, config, one);
  VerbBudget budget = VerbBudget::unlimited();
  if (const Result<bool> made = block.advance(budget); !made) return made.error();
  return std::move(block.endpoints().front());
}

void Endpoint::add_to_hello(wire::Hello& hello) const {
  hello.capabilities |= roce_capability(ports_);
  for (const Port* port : ports_) {
    wire::HelloDevice device;
    device.guid = port->guid;
    std::memcpy(device.gid.data(), port->gid.gid.raw, device.gid.size());
    device.max_message_bytes = verbatim::max_message_bytes(*port);
    device.speed_mbps = port->speed_mbps;
    device.lid = port->lid;
    device.link_layer = port->link_layer;
    device.grh_required = port->grh_required;
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

Result<bool> Endpoint::connect(const wire::Hello& remote, const Config& config, int traffic_class, VerbBudget& budget) {
  if (remote.qps.size() != qps_.size()) return Error{ErrorKind::kRemote, EPROTO, "hello with another number of QPs"};
  if (monotonic_ns() < resolve_ns_) return false;
  if (connected_qps_ == 0) {
    remote_ = remote;
    peer_name_ = remote.host.substr(0, HOST_NAME_MAX) + " (pid " + std::to_string(remote.pid) + ")";
    max_message_bytes_ = kMaxPieceBytes;
  }
  for (std::size_t i = connected_qps_; i < qps_.size(); ++i) {
    EndpointQp& end = qps_[i];
    const bool has_lag = ports_[end.device]->device->mlx5_capabilities().num_lag_ports > 1;
    if (!budget.take(kVerbsToConnectQp + (has_lag ? 1 : 0))) return false;
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
    QpPath& path = end.path;
    path.mtu = static_cast<ibv_mtu>(std::min<int>(port.active_mtu, peer.mtu));
    path.traffic_class =
        config.traffic_class.value_or(static_cast<std::uint8_t>(traffic_class < 0 ? 0 : traffic_class));
    path.service_level = config.service_level.value_or(service_level_of(traffic_class));
    if (port.is_roce()) path.flow_label = flow_label(remote.attempt, i, qps_.size());
    if (const Status moved = to_rtr(end.qp.get(), port, address_of(remote, peer, peer_qp), path); !moved) {
      if (moved.error().sys_errno != ETIMEDOUT) return moved.error();
      wait_for_neighbour(moved.error());
      budget.exhaust();
      return false;
    }
    unresolved_.reset();
    resolve_pause_ns_ = 0;
    if (const Status moved = to_rts(end.qp.get(), port, config.timeout, config.retry_count, peer.responder_reads);
        !moved)
      return moved.error();
    if (const auto lag = lag_port(*port.device, remote.attempt, i / ports_.size(), qps_.size() / ports_.size())) {
      end.lag_port = set_lag_port(end.qp.get(), *port.device, *lag);
    }
    connected_qps_ = i + 1;
  }
  if (max_message_bytes_ > kPieceAlignBytes) max_message_bytes_ -= max_message_bytes_ % kPieceAlignBytes;
  timeout_ = config.timeout;
  retry_count_ = config.retry_count;
  for (const Port* port : ports_) counters_.push_back(port->device->history().recent_counters(port->port_num));
  connected_ns_ = monotonic_ns();
  return true;
}

void Endpoint::wait_for_neighbour(const Error& error) {
  unresolved_ = error;
  resolve_pause_ns_ =
      resolve_pause_ns_ == 0 ? kFirstResolvePauseNs : std::min(2 * resolve_pause_ns_, kMaxResolvePauseNs);
  resolve_ns_ = monotonic_ns() + resolve_pause_ns_;
}

bool Endpoint::resolve_repeated() const {
  return unresolved_ && resolve_pause_ns_ > kFirstResolvePauseNs;
}

void Endpoint::exchange_qps(std::span<const std::uint8_t> indexes, std::vector<EndpointQp>& made,
                            const wire::LaneAddress& remote) {
  for (std::size_t i = 0; i < indexes.size(); ++i) {
    EndpointQp& end = qps_[indexes[i]];  // other threads read its sizes, which stay
    std::swap(end.qp, made[i].qp);
    std::swap(end.gids, made[i].gids);
    remote_.qps[indexes[i]].number = remote.qp_numbers[i];
  }
}

std::vector<std::uint32_t> Endpoint::qp_shares(const std::vector<bool>& left_out) const {
  std::vector<QpLane> lanes;
  std::vector<std::uint32_t> speeds;
  std::vector<std::uint32_t> remote_speeds;
  for (std::size_t i = 0; i < qps_.size(); ++i) {
    if (left_out.empty() || !left_out[i]) lanes.push_back({qps_[i].device, qps_[i].remote_device});
  }
  for (const Port* port : ports_) speeds.push_back(port->speed_mbps);
  for (const wire::HelloDevice& device : remote_.devices) remote_speeds.push_back(device.speed_mbps);
  std::vector<std::uint32_t> shares = verbatim::qp_shares(lanes, speeds, remote_speeds);
  for (std::size_t i = 0; i < left_out.size(); ++i) {
    if (left_out[i]) shares.insert(shares.begin() + static_cast<std::ptrdiff_t>(i), 0);
  }
  return shares;
}

std::size_t Endpoint::lanes() const {
  std::set<std::pair<std::uint8_t, std::uint8_t>> pairs;
  for (const EndpointQp& end : qps_) pairs.emplace(end.device, end.remote_device);
  return pairs.size();
}

PathFacts Endpoint::path(std::size_t qp, const std::string& host) const {
  const EndpointQp& end = qps_[qp];
  const Port& port = *ports_[end.device];
  PathFacts facts;
  facts.local.host = host;
  facts.local.device = port.device->name();
  facts.local.port = port.port_num;
  const GidEntry& own = gid(qp);
  facts.local.gid_index = own.index;
  facts.local.gid = own.gid;
  facts.local.roce_version = own.version;
  facts.local.qp = end.qp->qp_num;
  facts.local.mtu = port.active_mtu;
  facts.roce = port.is_roce();
  facts.mtu = end.path.mtu;
  facts.traffic_class = end.path.traffic_class;
  facts.service_level = end.path.service_level;
  if (remote_.qps.size() <= qp) return facts;
  const wire::HelloDevice& peer = remote_.devices[end.remote_device];
  PathEnd& remote = facts.remote.emplace();
  remote.host = remote_.host;
  remote.device = peer.name;
  remote.port = peer.port;
  remote.gid_index = end.gids != nullptr ? end.gids->remote_index : peer.gid_index;
  std::memcpy(remote.gid.raw, remote_gid(qp).data(), sizeof remote.gid.raw);
  remote.roce_version = roce_version(remote_);
  remote.qp = remote_.qps[qp].number;
  remote.mtu = static_cast<ibv_mtu>(peer.mtu);
  return facts;
}

PathFacts Endpoint::path_facts(std::size_t qp, const std::string& host) const {
  PathFacts facts = path(qp, host);
  if (connected_ns_ == 0) return facts;
  constexpr std::size_t kMaxCounters = 6;
  const std::size_t device = qps_[qp].device;
  const Port& port = *ports_[device];
  // Reading the counters takes a while. It comes first, because the event of a link that went down may arrive just
  // after the failure and is needed below.
  facts.counters = describe_changes(*counters_[device], port.device->history().counters(port.port_num), kMaxCounters);
  const std::uint64_t now = monotonic_ns();
  facts.timeout = timeout_;
  facts.retries = retry_count_;
  facts.age_ns = now - connected_ns_;
  facts.link = port.device->history().link_since(port.port_num, connected_ns_, now);
  if (const auto attributes = port.device->verbs().port_attributes(port.device->context(), port.port_num)) {
    facts.port_state = attributes->state;
  } else {
    facts.port_errno = attributes.error().sys_errno;
  }
  ibv_gid gid{};
  facts.gid_removed = port.is_roce() &&
                      port.device->verbs().query_gid(port.device->context(), port.port_num,
                                                     static_cast<int>(facts.local.gid_index), &gid) == 0 &&
                      std::memcmp(gid.raw, facts.local.gid.raw, sizeof gid.raw) != 0;
  return facts;
}

std::string Endpoint::describe_path(std::size_t qp, const std::string& host) const {
  return verbatim::describe_path(path(qp, host));
}

}  // namespace verbatim
