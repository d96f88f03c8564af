#include "net/connect/endpoint_pool.h"

#include <algorithm>
#include <deque>
#include <list>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/transfer/endpoint_block.h"

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

struct EndpointReservation {
  const EndpointRequest request;
  const std::shared_ptr<EndpointPlan> plan;
  // These four: under the plan's mutex.
  bool waits = false;  // for the end of its burst, then for its block
  bool native = false;
  EndpointPlacement placement = {};
  std::optional<Endpoint> endpoint = std::nullopt;

  // Native: the endpoint while it is created, and whether unused endpoints of others have been released for it.
  std::unique_ptr<EndpointBlock> creation = nullptr;
  bool released_unused = false;
};

// The slots of endpoints of one kind. Owned by the pool and the reservations. Any thread. Verbs are called without the
// mutex: one thread at a time continues a block, others that need it get "not yet".
class EndpointPlan {
 public:
  EndpointPlan(const EndpointRequest& kind, const Config& config) : kind_(kind), config_(config) {}

  bool serves(const EndpointRequest& request) const {
    return kind_.kind == request.kind && kind_.announced.collective == request.announced.collective &&
           kind_.ports == request.ports && kind_.sizes == request.sizes;
  }
  bool uses_device_of(std::span<const Port* const> ports) const {
    return std::find_first_of(ports.begin(), ports.end(), kind_.ports.begin(), kind_.ports.end(),
                              [](const Port* a, const Port* b) { return a->device == b->device; }) != ports.end();
  }

  void add(const std::shared_ptr<EndpointReservation>& reservation) VERBATIM_EXCLUDES(mutex_);
  // Ends the burst if it is time, and continues the creation of blocks. False: the reservation waits.
  bool prepare(EndpointReservation& reservation, VerbBudget& budget) VERBATIM_EXCLUDES(mutex_);
  // See EndpointPools.
  bool release_unused() VERBATIM_EXCLUDES(mutex_);
  bool destroy_released(VerbBudget& budget) VERBATIM_EXCLUDES(mutex_);

 private:
  using Reservations = std::vector<std::shared_ptr<EndpointReservation>>;

  struct PlannedBlock {
    std::uint32_t number;
    std::vector<std::uint32_t> slots;         // indexes, rising
    std::unique_ptr<EndpointBlock> creation;  // nullptr: a thread continues it now
  };
  struct Assigned {
    std::weak_ptr<EndpointReservation> reservation;
    QpSlot slot;
  };

  AnnouncedFlows expected_flows(const EndpointRequest& request) const;
  BlockShape announced_shape(const EndpointRequest& request) const;
  // Assigns slots to all reservations that wait, and plans the blocks that are missing.
  void end_burst() VERBATIM_REQUIRES(mutex_);
  std::vector<QpSlot> assign_slots(const Reservations& reservations, const BlockShape& announced)
      VERBATIM_REQUIRES(mutex_);
  void plan_block(const QpBlock& block, std::vector<std::uint32_t> slots) VERBATIM_REQUIRES(mutex_);
  // Continues the first planned block, if no other thread does.
  void continue_block(VerbBudget& budget) VERBATIM_EXCLUDES(mutex_);
  void finish_block(const Result<bool>& made, std::vector<Endpoint>& endpoints) VERBATIM_REQUIRES(mutex_);
  bool is_planned(std::uint32_t block) const VERBATIM_REQUIRES(mutex_);
  bool is_awaited(std::uint32_t block) const VERBATIM_REQUIRES(mutex_);
  // Gives the endpoints of complete blocks to their reservations; releases those of dropped reservations.
  void distribute() VERBATIM_REQUIRES(mutex_);
  void release(std::vector<Endpoint> endpoints) VERBATIM_REQUIRES(mutex_);

  const EndpointRequest kind_;  // the first request
  const Config& config_;
  Mutex mutex_;
  std::map<wire::PeerIdentity, std::uint32_t> connections_ VERBATIM_GUARDED_BY(mutex_);
  bool native_ VERBATIM_GUARDED_BY(mutex_) = false;  // the device could not create a block
  std::uint32_t native_qps_ VERBATIM_GUARDED_BY(mutex_) = 0;
  QpPlanner planner_ VERBATIM_GUARDED_BY(mutex_);  // of announced flows
  std::uint32_t blocks_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::deque<PlannedBlock> planned_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<Assigned> assigned_ VERBATIM_GUARDED_BY(mutex_);  // whose reservations wait for their block
  bool undistributed_ VERBATIM_GUARDED_BY(mutex_) =
      false;  // a block is complete, or slots of complete blocks are assigned
  // By block and index of the slot.
  std::map<std::pair<std::uint32_t, std::uint32_t>, Endpoint> unused_ VERBATIM_GUARDED_BY(mutex_);
  std::list<std::unique_ptr<EndpointBlock>> released_ VERBATIM_GUARDED_BY(mutex_);  // abandoned blocks
  bool destroying_ VERBATIM_GUARDED_BY(mutex_) = false;  // a thread has taken them out and destroys them now

  std::vector<std::weak_ptr<EndpointReservation>> waiting_ VERBATIM_GUARDED_BY(mutex_);
  std::uint64_t first_request_ns_ VERBATIM_GUARDED_BY(mutex_) = 0;  // of those that wait
  std::uint64_t last_request_ns_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::optional<wire::PeerIdentity> last_peer_ VERBATIM_GUARDED_BY(mutex_);
  bool rotates_ VERBATIM_GUARDED_BY(mutex_) = false;  // unknown until a request shows it or the first burst ends
};

// VERBATIM_QP_POOL replaces the announcement of point-to-point connections.
AnnouncedFlows EndpointPlan::expected_flows(const EndpointRequest& request) const {
  if (config_.qp_pool.peers == 0 || request.announced.collective) return request.announced;
  const std::size_t qps = config_.qp_pool.qps * request.ports.size();
  const std::size_t connections = (qps + request.sizes.qps - 1) / request.sizes.qps;
  return {.peers = config_.qp_pool.peers, .flows = static_cast<unsigned>(connections)};
}

// Empty when nothing is announced, or when not even one connection fits.
BlockShape EndpointPlan::announced_shape(const EndpointRequest& request) const {
  const std::size_t qps_per_device = (request.sizes.qps + request.ports.size() - 1) / request.ports.size();
  return choose_block_shape(expected_flows(request), qps_per_device, max_block_qps(request.ports));
}

void EndpointPlan::add(const std::shared_ptr<EndpointReservation>& reservation) {
  const EndpointRequest& request = reservation->request;
  const AnnouncedFlows expected = expected_flows(request);
  const BlockShape shape = announced_shape(request);
  const MutexLock lock(mutex_);
  const std::uint32_t connection = connections_[request.peer]++;
  reservation->placement = {.collective = request.announced.collective, .connection = connection};
  // A connection of the communicator to itself does not use the NIC's port towards a peer: it gets no slot.
  if (config_.qp_order == QpOrder::kNative || native_ || request.peer == request.self ||
      (expected.known() && shape.peers == 0)) {
    return;
  }
  if (connection == 0) {
    const bool same_process =
        request.peer.host_id == request.self.host_id && request.peer.process_id == request.self.process_id;
    const bool rises = last_peer_ ? *last_peer_ < request.peer : request.peer < request.self;
    rotates_ = rotates_ || !same_process || !rises;
    last_peer_ = request.peer;
  }
  reservation->waits = true;
  last_request_ns_ = monotonic_ns();
  if (waiting_.empty()) first_request_ns_ = last_request_ns_;
  waiting_.push_back(reservation);
  const bool known_order = expected.known() && (rotates_ || shape.peers == 1);
  const bool complete = expected.known() && waiting_.size() >= std::size_t{expected.peers} * expected.flows;
  if (known_order || complete || last_request_ns_ - first_request_ns_ >= kMaxGatherNs) end_burst();
}

bool EndpointPlan::prepare(EndpointReservation& reservation, VerbBudget& budget) {
  bool builds = false;
  {
    const MutexLock lock(mutex_);
    const std::uint64_t now = monotonic_ns();
    if (!waiting_.empty() && (now - last_request_ns_ >= config_.qp_gather_us * kNanosecondsPerMicrosecond ||
                              now - first_request_ns_ >= kMaxGatherNs)) {
      end_burst();
    }
    if (undistributed_) distribute();
    builds = reservation.waits;
  }
  if (builds) continue_block(budget);
  const MutexLock lock(mutex_);
  if (reservation.waits || reservation.endpoint || reservation.native) return !reservation.waits;
  reservation.native = true;
  reservation.placement.first_position = native_qps_;
  native_qps_ += static_cast<std::uint32_t>(kind_.sizes.qps);
  return true;
}

// Without memory they go on waiting, and the next call tries again.
void EndpointPlan::end_burst() {
  Reservations reservations;
  for (const std::weak_ptr<EndpointReservation>& waiting : waiting_) {
    if (std::shared_ptr<EndpointReservation> reservation = waiting.lock())
      reservations.push_back(std::move(reservation));
  }
  if (reservations.empty()) return waiting_.clear();
  assigned_.reserve(assigned_.size() + reservations.size());
  const BlockShape announced = announced_shape(reservations.back()->request);
  if (announced.peers == 0 || !rotates_) {
    std::stable_sort(reservations.begin(), reservations.end(), [](const auto& a, const auto& b) {
      return precedes_in_ring(a->request.self, a->request.peer, b->request.peer);
    });
  }
  rotates_ = true;
  const std::vector<QpSlot> slots = assign_slots(reservations, announced);
  for (std::size_t i = 0; i < reservations.size(); ++i) assigned_.push_back({reservations[i], slots[i]});
  waiting_.clear();
  undistributed_ = true;
}

bool EndpointPlan::is_planned(std::uint32_t block) const {
  for (const PlannedBlock& planned : planned_) {
    if (planned.number == block) return true;
  }
  return false;
}

bool EndpointPlan::is_awaited(std::uint32_t block) const {
  return std::any_of(assigned_.begin(), assigned_.end(),
                     [&](const Assigned& one) { return one.slot.block.number == block && !one.reservation.expired(); });
}

void EndpointPlan::distribute() {
  std::vector<Endpoint> dropped;
  std::size_t kept = 0;
  for (Assigned& one : assigned_) {
    const QpBlock& block = one.slot.block;
    if (is_planned(block.number)) {
      std::swap(assigned_[kept++], one);
      continue;
    }
    auto endpoint = unused_.extract({block.number, one.slot.index()});
    const std::shared_ptr<EndpointReservation> reservation = one.reservation.lock();
    if (reservation == nullptr) {
      if (endpoint) dropped.push_back(std::move(endpoint.mapped()));
      continue;
    }
    reservation->waits = false;
    if (!endpoint) continue;  // the device was full, when the block was created or later
    reservation->endpoint = std::move(endpoint.mapped());
    reservation->placement.order = QpOrder::kStaggered;
    reservation->placement.block = block.number;
    reservation->placement.peers = block.shape.peers;
    reservation->placement.first_position = one.slot.first_position(kind_.sizes.qps);
  }
  assigned_.erase(assigned_.begin() + static_cast<std::ptrdiff_t>(kept), assigned_.end());
  undistributed_ = false;
  release(std::move(dropped));
}

// Of an announced block all slots are created, of the block of a burst those that are requested.
std::vector<QpSlot> EndpointPlan::assign_slots(const Reservations& reservations, const BlockShape& announced) {
  QpPlanner burst_planner;
  BlockShape burst;
  std::map<wire::PeerIdentity, unsigned> flows;
  for (const auto& reservation : reservations) burst.flows = std::max(burst.flows, ++flows[reservation->request.peer]);
  burst.peers = static_cast<unsigned>(flows.size());
  const bool is_burst = announced.peers == 0;
  std::uint32_t next_new = blocks_;
  std::vector<QpSlot> slots;
  std::vector<std::uint32_t> indexes;
  for (const auto& reservation : reservations) {
    slots.push_back(
        (is_burst ? burst_planner : planner_).assign(reservation->request.peer, is_burst ? burst : announced, blocks_));
    blocks_ = std::max(blocks_, slots.back().block.number + 1);
    indexes.push_back(slots.back().index());
  }
  for (const QpSlot& slot : slots) {
    if (slot.block.number < next_new || native_) continue;
    ++next_new;
    if (!is_burst) {
      indexes.resize(std::size_t{slot.block.shape.peers} * slot.block.shape.flows);
      std::iota(indexes.begin(), indexes.end(), 0U);
    }
    plan_block(slot.block, indexes);
  }
  return slots;
}

void EndpointPlan::plan_block(const QpBlock& block, std::vector<std::uint32_t> slots) {
  std::sort(slots.begin(), slots.end());
  std::vector<std::size_t> flows(block.shape.flows);
  for (const std::uint32_t slot : slots) ++flows[slot / block.shape.peers];
  auto creation = std::make_unique<EndpointBlock>(kind_.ports, kind_.sizes, config_, flows);
  planned_.push_back({block.number, std::move(slots), std::move(creation)});
}

void EndpointPlan::continue_block(VerbBudget& budget) {
  std::unique_ptr<EndpointBlock> creation;
  {
    const MutexLock lock(mutex_);
    if (planned_.empty() || planned_.front().creation == nullptr) return;
    creation = std::move(planned_.front().creation);
  }
  Result<bool> made = false;
  try {
    made = creation->advance(budget);
  } catch (...) {  // no memory
    const MutexLock lock(mutex_);
    planned_.front().creation = std::move(creation);
    throw;
  }
  const MutexLock lock(mutex_);
  if (made && !*made) {
    planned_.front().creation = std::move(creation);
    return;
  }
  finish_block(made, creation->endpoints());
  distribute();
}

void EndpointPlan::finish_block(const Result<bool>& made, std::vector<Endpoint>& endpoints) {
  undistributed_ = true;
  const PlannedBlock block = std::move(planned_.front());
  planned_.pop_front();
  const std::vector<std::uint32_t>& slots = block.slots;
  if (!made) {
    native_ = true;
    planned_.clear();
    VERBATIM_INFO(
        "%s: the QPs of %zu connections could not be created together: %s. From now on QPs are created for one "
        "connection at a time",
        join_names(kind_.ports).c_str(), slots.size(), to_string(made.error()).c_str());
    return;
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    unused_.emplace(std::pair(block.number, slots[i]), std::move(endpoints[i]));
  }
}

void EndpointPlan::release(std::vector<Endpoint> endpoints) {
  if (!endpoints.empty()) released_.push_back(std::make_unique<EndpointBlock>(std::move(endpoints), config_));
}

bool EndpointPlan::release_unused() {
  const MutexLock lock(mutex_);
  std::vector<Endpoint> endpoints;
  endpoints.reserve(unused_.size());
  for (auto& unused : unused_) endpoints.push_back(std::move(unused.second));
  unused_.clear();
  release(std::move(endpoints));
  for (auto at = planned_.begin(); at != planned_.end();) {
    if (at->creation == nullptr || is_awaited(at->number)) {
      ++at;
      continue;
    }
    at->creation->abandon();
    released_.push_back(std::move(at->creation));
    at = planned_.erase(at);
  }
  return destroying_ || !released_.empty();
}

// One thread at a time: another one must not destroy a CQ while this one destroys its QP.
bool EndpointPlan::destroy_released(VerbBudget& budget) {
  decltype(released_) blocks;
  {
    const MutexLock lock(mutex_);
    if (destroying_) return false;
    if (released_.empty()) return true;
    blocks.swap(released_);
    destroying_ = true;
  }
  while (!blocks.empty()) {
    const Result<bool> done = blocks.front()->advance(budget);
    if (done && !*done) break;
    blocks.pop_front();
  }
  const MutexLock lock(mutex_);
  destroying_ = false;
  released_.splice(released_.begin(), blocks);
  return released_.empty();
}

std::size_t max_block_qps(std::span<const Port* const> ports) {
  std::size_t max = kMaxBlockQps;
  for (const Port* port : ports) {
    const ibv_device_attr& limits = port->device->attributes();
    max = std::min({max, share(limits.max_qp), share(limits.max_cq)});
  }
  return max;
}

void EndpointPools::add(const std::shared_ptr<EndpointPlan>& plan) {
  const MutexLock lock(mutex_);
  std::erase_if(plans_, [](const auto& known) { return known.expired(); });
  plans_.push_back(plan);
}

std::vector<std::shared_ptr<EndpointPlan>> EndpointPools::plans_using(std::span<const Port* const> ports) {
  std::vector<std::shared_ptr<EndpointPlan>> plans;
  {
    const MutexLock lock(mutex_);
    for (const std::weak_ptr<EndpointPlan>& plan : plans_) plans.push_back(plan.lock());
  }
  std::erase_if(plans, [&](const auto& plan) { return plan == nullptr || !plan->uses_device_of(ports); });
  return plans;
}

bool EndpointPools::release_unused(std::span<const Port* const> ports) {
  const auto plans = plans_using(ports);
  return std::count_if(plans.begin(), plans.end(), [](const auto& plan) { return plan->release_unused(); }) != 0;
}

bool EndpointPools::destroy_released(std::span<const Port* const> ports, VerbBudget& budget) {
  const auto plans = plans_using(ports);
  return std::all_of(plans.begin(), plans.end(), [&](const auto& plan) { return plan->destroy_released(budget); });
}

void EndpointPool::announce(const Announcement& announcement) {
  const MutexLock lock(mutex_);
  if (announced_.size() == kMaxAnnouncingThreads) announced_.clear();
  announced_[std::this_thread::get_id()] = announcement;
  last_announced_ = announcement;
}

AnnouncedFlows EndpointPool::announced(CommKind kind) const {
  const MutexLock lock(mutex_);
  const auto own = announced_.find(std::this_thread::get_id());
  const Announcement& announcement = own != announced_.end() ? own->second : last_announced_;
  return kind == CommKind::kSend ? announcement.send : announcement.recv;
}

std::shared_ptr<EndpointReservation> EndpointPool::reserve(EndpointRequest wanted) {
  wanted.peer.listen = 0;  // all listens of a communicator share the receiving port: they count as one peer
  std::shared_ptr<EndpointPlan> plan;
  {
    const MutexLock lock(mutex_);
    const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const auto& one) { return one->serves(wanted); });
    plan = found != plans_.end() ? *found : std::make_shared<EndpointPlan>(wanted, config_);
    if (found == plans_.end()) {
      plans_.push_back(plan);
      all_.add(plan);
    }
  }
  auto reservation = std::make_shared<EndpointReservation>(EndpointReservation{std::move(wanted), plan});
  plan->add(reservation);
  return reservation;
}

Result<std::optional<Endpoint>> EndpointPool::take(EndpointReservation& reservation, VerbBudget& budget) {
  Result<std::optional<Endpoint>> endpoint = take_endpoint(reservation, budget);
  reservation.plan->destroy_released(budget);  // last: no connection waits for it
  return endpoint;
}

Result<std::optional<Endpoint>> EndpointPool::take_endpoint(EndpointReservation& reservation, VerbBudget& budget) {
  if (!reservation.plan->prepare(reservation, budget)) return std::optional<Endpoint>();
  const EndpointRequest& request = reservation.request;
  if (!reservation.endpoint) {
    if (reservation.released_unused && !all_.destroy_released(request.ports, budget)) return std::optional<Endpoint>();
    const std::size_t one[] = {1};
    if (reservation.creation == nullptr) {
      reservation.creation = std::make_unique<EndpointBlock>(request.ports, request.sizes, config_, one);
    }
    const Result<bool> made = reservation.creation->advance(budget);
    if (made && !*made) return std::optional<Endpoint>();
    const std::unique_ptr<EndpointBlock> creation = std::move(reservation.creation);
    if (!made) {
      if (std::exchange(reservation.released_unused, true) || !all_.release_unused(request.ports)) return made.error();
      return std::optional<Endpoint>();
    }
    reservation.endpoint = std::move(creation->endpoints().front());
  }
  if (!budget.take(request.ports.size())) return std::optional<Endpoint>();
  reservation.endpoint->set_placement(reservation.placement);
  return std::exchange(reservation.endpoint, std::nullopt);
}

void EndpointPool::reset_order() noexcept {
  while (true) {
    std::shared_ptr<EndpointPlan> ended;  // destroyed without the mutex
    const MutexLock lock(mutex_);
    const auto found = std::ranges::find_if(plans_, [](const auto& plan) { return plan.use_count() == 1; });
    if (found == plans_.end()) return;
    ended = std::move(*found);
    plans_.erase(found);
  }
}

}  // namespace verbatim
