#include "net/connect/endpoint_pool.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace verbatim {
namespace {

// One block of more would be made in one go while all else waits, and may stay unused.
constexpr std::size_t kMaxBlockQps = 1024;
// The others on a device want some, too.
constexpr std::size_t kDeviceShareDivisor = 4;
constexpr std::uint64_t kMaxGatherNs = 2 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kNanosecondsPerMicrosecond = 1000;
// Threads that announce; a communicator has two.
constexpr std::size_t kMaxAnnouncingThreads = 64;

std::size_t share(int limit) {
  return limit > 0 ? static_cast<std::size_t>(limit) / kDeviceShareDivisor : kMaxBlockQps;
}

}  // namespace

std::size_t max_block_qps(std::span<const Port* const> ports) {
  std::size_t most = kMaxBlockQps;
  for (const Port* port : ports) {
    const ibv_device_attr& limits = port->device->attributes();
    most = std::min({most, share(limits.max_qp), share(limits.max_cq)});
  }
  return most;
}

void EndpointPools::add(EndpointPool& pool) {
  const MutexLock lock(mutex_);
  pools_.insert(&pool);
}

void EndpointPools::remove(EndpointPool& pool) {
  const MutexLock lock(mutex_);
  pools_.erase(&pool);
}

bool EndpointPools::release_unused() {
  const MutexLock lock(mutex_);
  bool any = false;
  for (EndpointPool* pool : pools_) any = pool->release_unused() || any;
  return any;
}

EndpointPool::EndpointPool(const Config& config, EndpointPools& all) : config_(config), all_(all) {
  all_.add(*this);
}

EndpointPool::~EndpointPool() {
  all_.remove(*this);
}

void EndpointPool::announce(const Announcement& announcement) {
  const MutexLock lock(announced_mutex_);
  if (announced_.size() == kMaxAnnouncingThreads) announced_.clear();
  announced_[std::this_thread::get_id()] = announcement;
  last_announced_ = announcement;
}

Traffic EndpointPool::announced(QpSide side) const {
  const MutexLock lock(announced_mutex_);
  const auto own = announced_.find(std::this_thread::get_id());
  const Announcement& announcement = own != announced_.end() ? own->second : last_announced_;
  return side == QpSide::kSend ? announcement.send : announcement.recv;
}

// What to prepare for: as the user says, else as NCCL does.
Traffic EndpointPool::expected_traffic(const EndpointRequest& request) const {
  if (config_.qp_pool.peers == 0 || request.traffic.collective) return request.traffic;
  const std::size_t qps = config_.qp_pool.qps * request.ports.size();
  const std::size_t connections = (qps + request.sizes.qps - 1) / request.sizes.qps;
  return {.peers = config_.qp_pool.peers, .flows = static_cast<unsigned>(connections)};
}

EndpointPool::Partition& EndpointPool::partition_for(const EndpointRequest& request) {
  for (const std::unique_ptr<Partition>& partition : partitions_) {
    if (partition->side == request.side && partition->collective == request.traffic.collective &&
        partition->ports == request.ports && partition->sizes == request.sizes) {
      return *partition;
    }
  }
  partitions_.push_back(
      std::make_unique<Partition>(Partition{request.side, request.traffic.collective, request.ports, request.sizes}));
  return *partitions_.back();
}

std::shared_ptr<EndpointReservation> EndpointPool::reserve(EndpointRequest request) {
  auto reservation = std::make_shared<EndpointReservation>(std::move(request));
  const EndpointRequest& wanted = reservation->request_;
  const MutexLock lock(mutex_);
  Partition& partition = partition_for(wanted);
  reservation->placement_ = {
      .peer = wanted.peer, .collective = wanted.traffic.collective, .connection = partition.connections[wanted.peer]++};
  // A connection to oneself stands in nobody's way: it takes no place in the rotation.
  if (config_.qp_order == QpOrder::kNative || partition.native || wanted.peer == wanted.self) return reservation;
  if (config_.qp_order == QpOrder::kPool) {
    take_from_block(partition, *reservation);
    return reservation;
  }
  reservation->state_ = EndpointReservation::State::kGathered;
  partition.gathered_last_ns = monotonic_ns();
  if (partition.gathered.empty()) partition.gathered_first_ns = partition.gathered_last_ns;
  partition.gathered.push_back(reservation);
  const Traffic traffic = expected_traffic(wanted);
  const bool complete = traffic.known() && partition.gathered.size() >= std::size_t{traffic.peers} * traffic.flows;
  if (complete || partition.gathered_last_ns - partition.gathered_first_ns >= kMaxGatherNs) create_gathered(partition);
  return reservation;
}

void EndpointPool::take_from_block(Partition& partition, EndpointReservation& reservation) {
  const EndpointRequest& request = reservation.request_;
  const std::size_t qps_per_device = (request.sizes.qps + request.ports.size() - 1) / request.ports.size();
  const BlockShape shape = choose_block_shape(expected_traffic(request), qps_per_device, max_block_qps(request.ports));
  if (shape.peers == 0) return;
  const QpPlacement placement = partition.planner.assign(request.peer, shape);
  const QpPlanner::Layer& layer = partition.planner.layer(placement.layer);
  if (placement.layer == partition.layers.size()) {
    const std::vector<std::size_t> rows(layer.rows, layer.peers);
    Result<std::vector<Endpoint>> made = Endpoint::create_rows(request.ports, request.sizes, config_, rows);
    if (!made) return fall_back_to_native(partition, std::size_t{layer.rows} * layer.peers, made.error());
    std::vector<std::optional<Endpoint>>& endpoints = partition.layers.emplace_back();
    for (Endpoint& endpoint : *made) endpoints.emplace_back(std::move(endpoint));
  }
  std::optional<Endpoint>& made =
      partition.layers[placement.layer][placement.layer_row * layer.peers + placement.column];
  if (!made) return;  // the device was full, and it was given back
  reservation.endpoint_ = std::exchange(made, std::nullopt);
  reservation.state_ = EndpointReservation::State::kReady;
  reservation.placement_.order = QpOrder::kPool;
  reservation.placement_.block = placement.block;
  reservation.placement_.row = placement.row;
  reservation.placement_.column = placement.column;
  reservation.placement_.peers = layer.peers;
}

void EndpointPool::create_gathered(Partition& partition) {
  std::vector<std::shared_ptr<EndpointReservation>> reservations;
  for (const std::weak_ptr<EndpointReservation>& waiting : std::exchange(partition.gathered, {})) {
    if (std::shared_ptr<EndpointReservation> reservation = waiting.lock())
      reservations.push_back(std::move(reservation));
  }
  if (reservations.empty()) return;
  std::vector<PeerId> peers;
  for (const auto& reservation : reservations) peers.push_back(reservation->request_.peer);
  const std::vector<GatheredPlacement> placements = config_.qp_order == QpOrder::kRing
                                                        ? order_in_ring(peers, reservations.front()->request_.self)
                                                        : order_gathered(peers);
  std::vector<std::size_t> rows;
  for (const GatheredPlacement& placement : placements) {
    rows.resize(placement.row + 1);
    ++rows.back();
  }
  Result<std::vector<Endpoint>> made = Endpoint::create_rows(partition.ports, partition.sizes, config_, rows);
  if (!made) {
    fall_back_to_native(partition, reservations.size(), made.error());
    for (const auto& reservation : reservations) reservation->state_ = EndpointReservation::State::kCreateAtTake;
    return;
  }
  for (std::size_t i = 0; i < placements.size(); ++i) {
    EndpointReservation& reservation = *reservations[placements[i].request_index];
    reservation.endpoint_ = std::move((*made)[i]);
    reservation.state_ = EndpointReservation::State::kReady;
    reservation.placement_.order = config_.qp_order;
    reservation.placement_.block = partition.burst_count;
    reservation.placement_.row = placements[i].row;
    reservation.placement_.column = placements[i].column;
    reservation.placement_.peers = static_cast<std::uint32_t>(rows.front());
  }
  ++partition.burst_count;
}

void EndpointPool::fall_back_to_native(Partition& partition, std::size_t endpoints, const Error& error) {
  partition.native = true;
  VERBATIM_INFO("%s: no room for %zu connections at once (%s): queue pairs are made one connection at a time from here",
                partition.ports.front()->name.c_str(), endpoints, to_string(error).c_str());
}

void EndpointPool::create_due() {
  const std::uint64_t now = monotonic_ns();
  for (const std::unique_ptr<Partition>& partition : partitions_) {
    if (partition->gathered.empty()) continue;
    if (now - partition->gathered_last_ns >= config_.qp_gather_us * kNanosecondsPerMicrosecond ||
        now - partition->gathered_first_ns >= kMaxGatherNs) {
      create_gathered(*partition);
    }
  }
}

void EndpointPool::poll() {
  if (config_.qp_order != QpOrder::kGather && config_.qp_order != QpOrder::kRing) return;
  const MutexLock lock(mutex_);
  create_due();
}

Result<std::optional<Endpoint>> EndpointPool::take(EndpointReservation& reservation) {
  {
    const MutexLock lock(mutex_);
    if (reservation.state_ == EndpointReservation::State::kGathered) create_due();
    if (reservation.state_ == EndpointReservation::State::kGathered) return std::optional<Endpoint>();
    if (reservation.state_ == EndpointReservation::State::kCreateAtTake) {
      Partition& partition = partition_for(reservation.request_);
      reservation.placement_.first_position = partition.native_qps;
      partition.native_qps += static_cast<std::uint32_t>(reservation.request_.sizes.qps);
    }
  }
  if (reservation.state_ == EndpointReservation::State::kCreateAtTake) {
    Result<Endpoint> made = Endpoint::create(reservation.request_.ports, reservation.request_.sizes, config_);
    if (!made && all_.release_unused())
      made = Endpoint::create(reservation.request_.ports, reservation.request_.sizes, config_);
    if (!made) return made.error();
    reservation.endpoint_ = std::move(*made);
  }
  std::optional<Endpoint> endpoint = std::exchange(reservation.endpoint_, std::nullopt);
  endpoint->set_placement(reservation.placement_);
  return endpoint;
}

bool EndpointPool::release_unused() {
  const MutexLock lock(mutex_);
  bool any = false;
  for (const std::unique_ptr<Partition>& partition : partitions_) {
    for (std::vector<std::optional<Endpoint>>& layer : partition->layers) {
      for (std::optional<Endpoint>& endpoint : layer) {
        any = any || endpoint.has_value();
        endpoint.reset();
      }
    }
  }
  return any;
}

void EndpointPool::reset_order() {
  const MutexLock lock(mutex_);
  std::erase_if(partitions_, [](const std::unique_ptr<Partition>& partition) { return partition->gathered.empty(); });
}

}  // namespace verbatim
