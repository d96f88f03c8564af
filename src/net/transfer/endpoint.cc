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
static_assert(wire::kMaxQps <= kFlowLabels);
// Pauses between attempts to resolve the peer's address: each attempt sends a few ARP or ND requests.
constexpr std::uint64_t kFirstResolvePauseNs = 20 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kMaxResolvePauseNs = kNanosecondsPerSecond;

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

}  // namespace

wire::HelloDevice hello_of(const Port& port) {
  wire::HelloDevice hello;
  std::memcpy(hello.gid.data(), port.gid.gid.raw, hello.gid.size());
  hello.max_message_bytes = max_message_bytes(port);
  hello.speed_mbps = port.speed_mbps;
  hello.lid = port.lid;
  hello.link_layer = port.link_layer;
  hello.grh_required = port.grh_required;
  hello.mtu = static_cast<std::uint8_t>(port.active_mtu);
  hello.port = port.port_num;
  hello.gid_index = static_cast<std::uint8_t>(port.gid.index);
  hello.responder_reads = responder_reads(*port.device);
  hello.name = port.device->name();
  return hello;
}

wire::HelloQp hello_of(ibv_qp* qp, const Device& device, bool ece) {
  wire::HelloQp hello{.number = qp->qp_num};
  if (!ece) return hello;
  const Result<std::optional<ibv_ece>> options = query_ece(qp, device);
  hello.has_ece = options && *options;
  if (hello.has_ece) hello.ece = {(*options)->vendor_id, (*options)->options, (*options)->comp_mask};
  return hello;
}

QpAddress address_of(const wire::HelloDevice& peer, RoceVersion version) {
  QpAddress address;
  address.lid = peer.lid;
  address.link_layer = peer.link_layer;
  address.grh_required = peer.grh_required;
  std::memcpy(address.gid.raw, peer.gid.data(), sizeof address.gid.raw);
  address.roce_version = version;
  return address;
}

std::optional<ibv_ece> ece_of(const wire::HelloQp& peer) {
  if (!peer.has_ece) return std::nullopt;
  return ibv_ece{peer.ece[0], peer.ece[1], peer.ece[2]};
}

QpPath path_to(const wire::HelloDevice& peer, const Port& port, const Config& config, int traffic_class) {
  const int given = std::max(traffic_class, 0);
  // NCCL uses the traffic class of a communicator as its service level too, of which devices take the low four bits.
  return {.mtu = static_cast<ibv_mtu>(std::min<int>(port.active_mtu, peer.mtu)),
          .traffic_class = config.traffic_class.value_or(static_cast<std::uint8_t>(given)),
          .service_level = config.service_level.value_or(static_cast<std::uint8_t>(given & 0xf))};
}

PathEnd path_end(const std::string& host, const Port& port, const GidEntry& gid, std::uint32_t qp) {
  return {.host = host,
          .device = port.device->name(),
          .port = port.port_num,
          .gid_index = gid.index,
          .gid = gid.gid,
          .qp = qp,
          .mtu = port.active_mtu,
          .roce_version = gid.version};
}

PathEnd path_end(const std::string& host, const wire::HelloDevice& peer, RoceVersion version) {
  return {.host = host,
          .device = peer.name,
          .port = peer.port,
          .gid_index = peer.gid_index,
          .gid = address_of(peer, version).gid,
          .mtu = static_cast<ibv_mtu>(peer.mtu),
          .roce_version = version};
}

void add_port_facts(PathFacts& facts, const Port& port, const GidEntry& gid, const PortCounters& before,
                    std::uint64_t connected_ns) {
  constexpr std::size_t kMaxCounters = 6;
  const Device& device = *port.device;
  // Reading the counters takes a while. It comes first, because the event of a link that went down may arrive just
  // after the failure and is needed below.
  facts.counters = describe_changes(before, device.history().counters(port.port_num), kMaxCounters);
  const std::uint64_t now = monotonic_ns();
  facts.age_ns = now - connected_ns;
  facts.link = device.history().link_since(port.port_num, connected_ns, now);
  if (const auto attributes = device.verbs().port_attributes(device.context(), port.port_num)) {
    facts.port_state = attributes->state;
  } else {
    facts.port_errno = attributes.error().sys_errno;
  }
  facts.gid_removed = port.is_roce() && is_gone(device.verbs(), device.context(), port.port_num, gid);
}

bool Endpoint::link_was_down(std::size_t qp) const {
  const Port& port = *ports_[qps_[qp].device];
  return port.device->history().link_since(port.port_num, connected_ns_, monotonic_ns()).downs != 0;
}

std::uint32_t max_message_bytes(const Port& port) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(port.max_msg_bytes, kMaxPieceBytes));
}

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
  for (const Port* port : ports_) hello.devices.push_back(hello_of(*port));
  for (const EndpointQp& end : qps_) {
    wire::HelloQp& qp = hello.qps.emplace_back(hello_of(end.qp.get(), *ports_[end.device]->device, ece_ && end.ece));
    qp.device = end.device;
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
    end.path = path_to(peer, port, config, traffic_class);
    if (port.is_roce()) end.path.flow_label = flow_label(remote.attempt, i, qps_.size());
    const std::uint32_t psn = first_psn(remote.attempt, 0);
    QpConnection connection{.remote = address_of(peer, roce_version(remote)),
                            .psns = {psn, psn},
                            .path = end.path,
                            .peer_reads = peer.responder_reads};
    connection.remote.qp_num = peer_qp.number;
    if (ece_) connection.ece = ece_of(peer_qp);
    connection.lag_index = lag_index(*port.device, remote.attempt, i / ports_.size(), qps_.size() / ports_.size());
    const Result<ConnectedQp> connected = connect_qp(end.qp.get(), port, connection, config);
    if (!connected) {
      if (!is_unresolved(connected.error())) return connected.error();
      wait_for_neighbour(connected.error());
      budget.exhaust();
      return false;
    }
    unresolved_.reset();
    resolve_pause_ns_ = 0;
    end.ece = connected->ece;
    end.lag_port = connected->lag_port;
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
  facts.local = path_end(host, port, gid(qp), end.qp->qp_num);
  facts.roce = port.is_roce();
  facts.mtu = end.path.mtu;
  facts.traffic_class = end.path.traffic_class;
  facts.service_level = end.path.service_level;
  if (remote_.qps.size() <= qp) return facts;
  PathEnd& remote =
      facts.remote.emplace(path_end(remote_.host, remote_.devices[end.remote_device], roce_version(remote_)));
  if (end.gids != nullptr) remote.gid_index = end.gids->remote_index;
  std::memcpy(remote.gid.raw, remote_gid(qp).data(), sizeof remote.gid.raw);
  remote.qp = remote_.qps[qp].number;
  return facts;
}

PathFacts Endpoint::path_facts(std::size_t qp, const std::string& host) const {
  PathFacts facts = path(qp, host);
  if (connected_ns_ == 0) return facts;
  const std::size_t device = qps_[qp].device;
  add_port_facts(facts, *ports_[device], gid(qp), *counters_[device], connected_ns_);
  facts.timeout = timeout_;
  facts.retries = retry_count_;
  return facts;
}

std::string Endpoint::describe_path(std::size_t qp, const std::string& host) const {
  return verbatim::describe_path(path(qp, host));
}

}  // namespace verbatim
