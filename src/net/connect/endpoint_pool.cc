#include "net/connect/endpoint_pool.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace verbatim {
namespace {

// The connections of a communicator wait while a block is created, and some of its QPs may stay unused.
constexpr std::size_t kMaxBlockQps = 1024;
// The rest of the device is left to other communicators and processes.
constexpr std::size_t kDeviceShareDivisor = 4;
// A burst of requests ends this long after its first one, even if there are new requests all the time.
constexpr std::uint64_t kMaxGatherNs = 2 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kNanosecondsPerMicrosecond = 1000;
// Announcing threads that are remembered. NCCL has two for a communicator.
constexpr std::size_t kMaxAnnouncingThreads = 64;

std::size_t share(int limit) {
  return limit > 0 ? static_cast<std::size_t>(limit) / kDeviceShareDivisor : kMaxBlockQps;
}

}  // namespace

std::size_t max_block_qps(std::span<const Port* const> ports) {
  std::size_t max = kMaxBlockQps;
  for (const Port* port : ports) {
    const ibv_device_attr& limits = port->device->attributes();
    max = std::min({max, share(limits.max_qp), share(limits.max_cq)});
  }
  return max;
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

// VERBATIM_QP_POOL replaces the announcement of point-to-point connections.
Traffic EndpointPool::expected_traffic(const EndpointRequest& request) const {
  if (config_.qp_pool.peers == 0 || request.traffic.collective) return request.traffic;
  const std::size_t qps = config_.qp_pool.qps * request.ports.size();
  const std::size_t connections = (qps + request.sizes.qps - 1) / request.sizes.qps;
  return {.peers = config_.qp_pool.peers, .flows = static_cast<unsigned>(connections)};
}

// Empty when nothing is announced, or when not even one connection fits.
BlockShape EndpointPool::announced_shape(const EndpointRequest& request) const {
  const std::size_t qps_per_device = (request.sizes.qps + request.ports.size() - 1) / request.ports.size();
  return choose_block_shape(expected_traffic(request), qps_per_device, max_block_qps(request.ports));
}

EndpointPool::Plan& EndpointPool::plan_for(const EndpointRequest& request) {
  for (const std::unique_ptr<Plan>& plan : plans_) {
    if (plan->side == request.side && plan->collective == request.traffic.collective && plan->ports == request.ports &&
        plan->sizes == request.sizes) {
      return *plan;
    }
  }
  plans_.push_back(
      std::make_unique<Plan>(Plan{request.side, request.traffic.collective, request.ports, request.sizes}));
  return *plans_.back();
}

std::shared_ptr<EndpointReservation> EndpointPool::reserve(EndpointRequest wanted) {
  auto reservation = std::make_shared<EndpointReservation>(std::move(wanted));
  const EndpointRequest& request = reservation->request_;
  const MutexLock lock(mutex_);
  Plan& plan = plan_for(request);
  const std::uint32_t connection = plan.connections[request.peer]++;
  reservation->placement_ = {.collective = request.traffic.collective, .connection = connection};
  const Traffic traffic = expected_traffic(request);
  const BlockShape shape = announced_shape(request);
  // A connection of the communicator to itself does not use the NIC's port towards a peer: it gets no slot.
  if (config_.qp_order == QpOrder::kNative || plan.native || request.peer == request.self ||
      (traffic.known() && shape.peers == 0)) {
    return reservation;
  }
  if (connection == 0) {
    const bool same_process = request.peer.host == request.self.host && request.peer.process == request.self.process;
    const bool rises = plan.last_peer ? *plan.last_peer < request.peer : request.peer < request.self;
    plan.rotates = plan.rotates || !same_process || !rises;
    plan.last_peer = request.peer;
  }
  reservation->state_ = EndpointReservation::State::kWaiting;
  plan.last_request_ns = monotonic_ns();
  if (plan.waiting.empty()) plan.first_request_ns = plan.last_request_ns;
  plan.waiting.push_back(reservation);
  const bool known_order = traffic.known() && (plan.rotates || shape.peers == 1);
  const bool complete = traffic.known() && plan.waiting.size() >= std::size_t{traffic.peers} * traffic.flows;
  if (known_order || complete || plan.last_request_ns - plan.first_request_ns >= kMaxGatherNs) end_burst(plan);
  return reservation;
}

void EndpointPool::end_burst(Plan& plan) {
  Reservations reservations;
  for (const std::weak_ptr<EndpointReservation>& waiting : std::exchange(plan.waiting, {})) {
    if (std::shared_ptr<EndpointReservation> reservation = waiting.lock())
      reservations.push_back(std::move(reservation));
  }
  if (reservations.empty()) return;
  const BlockShape announced = announced_shape(reservations.back()->request_);
  if (announced.peers == 0 || !plan.rotates) {
    std::stable_sort(reservations.begin(), reservations.end(), [](const auto& a, const auto& b) {
      return precedes_in_ring(a->request_.self, a->request_.peer, b->request_.peer);
    });
  }
  plan.rotates = true;
  const std::vector<QpSlot> slots = assign_slots(plan, reservations, announced);
  for (std::size_t i = 0; i < reservations.size(); ++i) {
    EndpointReservation& reservation = *reservations[i];
    auto endpoint = plan.unused.extract({slots[i].block.number, slots[i].index()});
    // Without an endpoint: the device was full, when the block was created or later.
    reservation.state_ = endpoint ? EndpointReservation::State::kReady : EndpointReservation::State::kCreateAtTake;
    if (!endpoint) continue;
    reservation.endpoint_ = std::move(endpoint.mapped());
    reservation.placement_.order = QpOrder::kStaggered;
    reservation.placement_.block = slots[i].block.number;
    reservation.placement_.peers = slots[i].block.shape.peers;
    reservation.placement_.first_position = slots[i].first_position(plan.sizes.qps);
  }
}

// Of an announced block all slots are created, of the block of a burst those that are requested.
std::vector<QpSlot> EndpointPool::assign_slots(Plan& plan, const Reservations& reservations,
                                               const BlockShape& announced) {
  QpPlanner burst_planner;
  BlockShape burst;
  std::map<PeerId, unsigned> flows;
  for (const auto& reservation : reservations) burst.flows = std::max(burst.flows, ++flows[reservation->request_.peer]);
  burst.peers = static_cast<unsigned>(flows.size());
  const bool is_burst = announced.peers == 0;
  std::uint32_t next_new = plan.blocks;
  std::vector<QpSlot> slots;
  std::vector<std::uint32_t> indexes;
  for (const auto& reservation : reservations) {
    slots.push_back((is_burst ? burst_planner : plan.planner)
                        .assign(reservation->request_.peer, is_burst ? burst : announced, plan.blocks));
    plan.blocks = std::max(plan.blocks, slots.back().block.number + 1);
    indexes.push_back(slots.back().index());
  }
  for (const QpSlot& slot : slots) {
    if (slot.block.number < next_new || plan.native) continue;
    ++next_new;
    if (!is_burst) {
      indexes.resize(std::size_t{slot.block.shape.peers} * slot.block.shape.flows);
      std::iota(indexes.begin(), indexes.end(), 0U);
    }
    create_block(plan, slot.block, indexes);
  }
  return slots;
}

void EndpointPool::create_block(Plan& plan, const QpBlock& block, std::vector<std::uint32_t> slots) {
  std::sort(slots.begin(), slots.end());
  std::vector<std::size_t> flows(block.shape.flows);
  for (const std::uint32_t slot : slots) ++flows[slot / block.shape.peers];
  Result<std::vector<Endpoint>> made = Endpoint::create_block(plan.ports, plan.sizes, config_, flows);
  if (!made) {
    plan.native = true;
    VERBATIM_INFO(
        "%s: the QPs of %zu connections could not be created together: %s. Next: from here on they are created "
        "one connection at a time",
        plan.ports.front()->name.c_str(), slots.size(), to_string(made.error()).c_str());
    return;
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    plan.unused.emplace(std::pair(block.number, slots[i]), std::move((*made)[i]));
  }
}

void EndpointPool::end_due_bursts() {
  const std::uint64_t now = monotonic_ns();
  for (const std::unique_ptr<Plan>& plan : plans_) {
    if (plan->waiting.empty()) continue;
    if (now - plan->last_request_ns >= config_.qp_gather_us * kNanosecondsPerMicrosecond ||
        now - plan->first_request_ns >= kMaxGatherNs) {
      end_burst(*plan);
    }
  }
}

void EndpointPool::poll() {
  if (config_.qp_order == QpOrder::kNative) return;
  const MutexLock lock(mutex_);
  end_due_bursts();
}

Result<std::optional<Endpoint>> EndpointPool::take(EndpointReservation& reservation) {
  {
    const MutexLock lock(mutex_);
    if (reservation.state_ == EndpointReservation::State::kWaiting) end_due_bursts();
    if (reservation.state_ == EndpointReservation::State::kWaiting) return std::optional<Endpoint>();
    if (reservation.state_ == EndpointReservation::State::kCreateAtTake) {
      Plan& plan = plan_for(reservation.request_);
      reservation.placement_.first_position = plan.native_qps;
      plan.native_qps += static_cast<std::uint32_t>(reservation.request_.sizes.qps);
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
  for (const std::unique_ptr<Plan>& plan : plans_) {
    any = any || !plan->unused.empty();
    plan->unused.clear();
  }
  return any;
}

void EndpointPool::reset_order() {
  const MutexLock lock(mutex_);
  std::erase_if(plans_, [](const std::unique_ptr<Plan>& plan) { return plan->waiting.empty(); });
}

}  // namespace verbatim
