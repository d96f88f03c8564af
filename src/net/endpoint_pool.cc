#include "net/endpoint_pool.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace verbatim {
namespace {

// One block of more would be made in one go while all else waits, and may stay unused.
constexpr std::size_t kMostBlockQps = 1024;
// The others on a device want some, too.
constexpr std::size_t kShareOfDevice = 4;
constexpr std::uint64_t kLongestGatherNs = 2 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kNanosecondsPerMicrosecond = 1000;
// Threads that announce; a communicator has two.
constexpr std::size_t kMostAnnouncers = 64;

std::size_t share(int limit) {
  return limit > 0 ? static_cast<std::size_t>(limit) / kShareOfDevice : kMostBlockQps;
}

}  // namespace

std::size_t most_block_qps(std::span<const Port* const> ports) {
  std::size_t most = kMostBlockQps;
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

bool EndpointPools::release_idle() {
  const MutexLock lock(mutex_);
  bool any = false;
  for (EndpointPool* pool : pools_) any = pool->release_idle() || any;
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
  if (announced_.size() == kMostAnnouncers) announced_.clear();
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
Traffic EndpointPool::expected(const EndpointWish& wish) const {
  if (config_.qp_pool.peers == 0 || wish.traffic.collective) return wish.traffic;
  const std::size_t qps = config_.qp_pool.qps * wish.ports.size();
  const std::size_t connections = (qps + wish.sizes.qps - 1) / wish.sizes.qps;
  return {.peers = config_.qp_pool.peers, .flows = static_cast<unsigned>(connections)};
}

EndpointPool::Line& EndpointPool::line_of(const EndpointWish& wish) {
  for (const std::unique_ptr<Line>& line : lines_) {
    if (line->side == wish.side && line->collective == wish.traffic.collective && line->ports == wish.ports &&
        line->sizes == wish.sizes) {
      return *line;
    }
  }
  lines_.push_back(std::make_unique<Line>(Line{wish.side, wish.traffic.collective, wish.ports, wish.sizes}));
  return *lines_.back();
}

std::shared_ptr<EndpointClaim> EndpointPool::claim(EndpointWish wish) {
  auto claim = std::make_shared<EndpointClaim>(std::move(wish));
  const EndpointWish& wanted = claim->wish_;
  const MutexLock lock(mutex_);
  Line& line = line_of(wanted);
  claim->place_ = {
      .peer = wanted.peer, .collective = wanted.traffic.collective, .connection = line.connections[wanted.peer]++};
  // A connection to oneself stands in nobody's way: it takes no place in the rotation.
  if (config_.qp_order == QpOrder::kNative || line.native || wanted.peer == wanted.self) return claim;
  if (config_.qp_order == QpOrder::kPool) {
    take_from_pool(line, *claim);
    return claim;
  }
  claim->state_ = EndpointClaim::State::kGathered;
  line.gathered_last_ns = monotonic_ns();
  if (line.gathered.empty()) line.gathered_first_ns = line.gathered_last_ns;
  line.gathered.push_back(claim);
  const Traffic traffic = expected(wanted);
  const bool complete = traffic.known() && line.gathered.size() >= std::size_t{traffic.peers} * traffic.flows;
  if (complete || line.gathered_last_ns - line.gathered_first_ns >= kLongestGatherNs) make_gathered(line);
  return claim;
}

void EndpointPool::take_from_pool(Line& line, EndpointClaim& claim) {
  const EndpointWish& wish = claim.wish_;
  const std::size_t qps_per_device = (wish.sizes.qps + wish.ports.size() - 1) / wish.ports.size();
  const BlockShape shape = shape_block(expected(wish), qps_per_device, most_block_qps(wish.ports));
  if (shape.peers == 0) return;
  const QpPlace place = line.planner.place(wish.peer, shape);
  const QpPlanner::Layer& layer = line.planner.layer(place.layer);
  if (place.layer == line.layers.size()) {
    const std::vector<std::size_t> rows(layer.rows, layer.peers);
    Result<std::vector<Endpoint>> made = Endpoint::create_rows(wish.ports, wish.sizes, config_, rows);
    if (!made) return give_up(line, std::size_t{layer.rows} * layer.peers, made.error());
    std::vector<std::optional<Endpoint>>& endpoints = line.layers.emplace_back();
    for (Endpoint& endpoint : *made) endpoints.emplace_back(std::move(endpoint));
  }
  std::optional<Endpoint>& made = line.layers[place.layer][place.layer_row * layer.peers + place.column];
  if (!made) return;  // the device was full, and it was given back
  claim.endpoint_ = std::exchange(made, std::nullopt);
  claim.state_ = EndpointClaim::State::kReady;
  claim.place_.order = QpOrder::kPool;
  claim.place_.block = place.block;
  claim.place_.row = place.row;
  claim.place_.column = place.column;
  claim.place_.peers = layer.peers;
}

void EndpointPool::make_gathered(Line& line) {
  std::vector<std::shared_ptr<EndpointClaim>> claims;
  for (const std::weak_ptr<EndpointClaim>& waiting : std::exchange(line.gathered, {})) {
    if (std::shared_ptr<EndpointClaim> claim = waiting.lock()) claims.push_back(std::move(claim));
  }
  if (claims.empty()) return;
  std::vector<PeerId> peers;
  for (const auto& claim : claims) peers.push_back(claim->wish_.peer);
  const std::vector<GatheredPlace> places =
      config_.qp_order == QpOrder::kRing ? order_in_ring(peers, claims.front()->wish_.self) : order_gathered(peers);
  std::vector<std::size_t> rows;
  for (const GatheredPlace& place : places) {
    rows.resize(place.row + 1);
    ++rows.back();
  }
  Result<std::vector<Endpoint>> made = Endpoint::create_rows(line.ports, line.sizes, config_, rows);
  if (!made) {
    give_up(line, claims.size(), made.error());
    for (const auto& claim : claims) claim->state_ = EndpointClaim::State::kMadeAtTake;
    return;
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    EndpointClaim& claim = *claims[places[i].request];
    claim.endpoint_ = std::move((*made)[i]);
    claim.state_ = EndpointClaim::State::kReady;
    claim.place_.order = config_.qp_order;
    claim.place_.block = line.bursts;
    claim.place_.row = places[i].row;
    claim.place_.column = places[i].column;
    claim.place_.peers = static_cast<std::uint32_t>(rows.front());
  }
  ++line.bursts;
}

void EndpointPool::give_up(Line& line, std::size_t endpoints, const Error& error) {
  line.native = true;
  VERBATIM_INFO("%s: no room for %zu connections at once (%s): queue pairs are made one connection at a time from here",
                line.ports.front()->name.c_str(), endpoints, to_string(error).c_str());
}

void EndpointPool::make_due() {
  const std::uint64_t now = monotonic_ns();
  for (const std::unique_ptr<Line>& line : lines_) {
    if (line->gathered.empty()) continue;
    if (now - line->gathered_last_ns >= config_.qp_gather_us * kNanosecondsPerMicrosecond ||
        now - line->gathered_first_ns >= kLongestGatherNs) {
      make_gathered(*line);
    }
  }
}

void EndpointPool::poll() {
  if (config_.qp_order != QpOrder::kGather && config_.qp_order != QpOrder::kRing) return;
  const MutexLock lock(mutex_);
  make_due();
}

Result<std::optional<Endpoint>> EndpointPool::take(EndpointClaim& claim) {
  {
    const MutexLock lock(mutex_);
    if (claim.state_ == EndpointClaim::State::kGathered) make_due();
    if (claim.state_ == EndpointClaim::State::kGathered) return std::optional<Endpoint>();
    if (claim.state_ == EndpointClaim::State::kMadeAtTake) {
      Line& line = line_of(claim.wish_);
      claim.place_.first_position = line.native_qps;
      line.native_qps += static_cast<std::uint32_t>(claim.wish_.sizes.qps);
    }
  }
  if (claim.state_ == EndpointClaim::State::kMadeAtTake) {
    Result<Endpoint> made = Endpoint::create(claim.wish_.ports, claim.wish_.sizes, config_);
    if (!made && all_.release_idle()) made = Endpoint::create(claim.wish_.ports, claim.wish_.sizes, config_);
    if (!made) return made.error();
    claim.endpoint_ = std::move(*made);
  }
  std::optional<Endpoint> endpoint = std::exchange(claim.endpoint_, std::nullopt);
  endpoint->set_place(claim.place_);
  return endpoint;
}

bool EndpointPool::release_idle() {
  const MutexLock lock(mutex_);
  bool any = false;
  for (const std::unique_ptr<Line>& line : lines_) {
    for (std::vector<std::optional<Endpoint>>& layer : line->layers) {
      for (std::optional<Endpoint>& endpoint : layer) {
        any = any || endpoint.has_value();
        endpoint.reset();
      }
    }
  }
  return any;
}

void EndpointPool::forget() {
  const MutexLock lock(mutex_);
  std::erase_if(lines_, [](const std::unique_ptr<Line>& line) { return line->gathered.empty(); });
}

}  // namespace verbatim
