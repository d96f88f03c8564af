#include "net/transfer/endpoint_block.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "base/log.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

constexpr std::size_t kVerbsOfPort = 2;  // ibv_query_port and ibv_query_gid; more if the GID has changed
constexpr std::size_t kVerbsOfQp = 2;    // ibv_create_qp, ibv_modify_qp to INIT

Result<UniqueCq> create_cq(const Port& port, std::size_t entries) {
  const Device& device = *port.device;
  const int limit = device.attributes().max_cqe;
  if (entries > static_cast<std::size_t>(std::max(limit, 0))) {
    VERBATIM_WARN(
        "%s: a connection needs a completion queue of %zu entries, but the device allows %d. Next: lower "
        "VERBATIM_QPS_PER_CONNECTION",
        port.name.c_str(), entries, limit);
    return Error{ErrorKind::kUsage, ENOMEM, "ibv_create_cq", true};
  }
  const Verbs& verbs = device.verbs();
  return adopt("ibv_create_cq", verbs.create_cq(device.context(), static_cast<int>(entries), nullptr, nullptr, 0),
               verbs.destroy_cq, SetupStep::kCreateQueue);
}

}  // namespace

Result<Port> refresh_port(const Port& known, const Config& config, LogLevel level) {
  const Device& device = *known.device;
  const Result<ibv_port_attr> attributes = device.verbs().port_attributes(device.context(), known.port_num);
  if (!attributes) return attributes.error();
  const Result<GidEntry> gid = confirm_gid(device.verbs(), device.context(), device.name().c_str(), known.port_num,
                                           *attributes, config.gid, known.gid);
  if (!gid) {
    const Result<ibv_port_attr> now = device.verbs().port_attributes(device.context(), known.port_num);
    if (!now) return now.error();  // the device has failed meanwhile
    log_line(level, __FILE__, __LINE__, "%s: GID %u %s does not exist any more, and the port has no other usable GID",
             known.name.c_str(), known.gid.index, to_string(known.gid.gid).c_str());
    return Error{gid.error().kind, gid.error().sys_errno, gid.error().operation, true};
  }
  Port port = known;
  port.gid = *gid;
  port.lid = attributes->lid;
  port.grh_required = (attributes->flags & IBV_QPF_GRH_REQUIRED) != 0;
  port.active_mtu = attributes->active_mtu;
  return port;
}

EndpointBlock::EndpointBlock(const std::vector<const Port*>& ports, const EndpointSizes& sizes, const Config& config,
                             std::span<const std::size_t> flows)
    : ports_(ports), sizes_(sizes), config_(config) {
  std::size_t first = 0;
  for (const std::size_t count : flows) {
    for (std::size_t qp = 0; qp < sizes.qps; ++qp) {
      for (std::size_t i = 0; i < count; ++i) order_.push_back({first + i, qp});
    }
    first += count;
  }
  endpoints_.reserve(first);
  while (endpoints_.size() < first) endpoints_.push_back(Endpoint());
  created_.reserve(order_.size());
}

EndpointBlock::EndpointBlock(std::vector<Endpoint> unused, const Config& config)
    : sizes_(), config_(config), endpoints_(std::move(unused)) {
  abandon();
}

void EndpointBlock::abandon() {
  if (state_ != State::kDestroy) begin_destroy();
  error_ = Error{ErrorKind::kSystem, ECANCELED, "creating QPs"};
}

Result<bool> EndpointBlock::advance(VerbBudget& budget) {
  while (state_ != State::kComplete) {
    Result<bool> done = false;
    switch (state_) {
      case State::kReadPorts:
        done = read_ports(budget);
        break;
      case State::kCreateCqs:
        done = create_cqs(budget);
        break;
      case State::kCreateQps:
        done = create_qps(budget);
        break;
      case State::kDistribute:
        if (distribute()) {
          state_ = State::kComplete;
        } else {
          layout_ = CqLayout::kPerQp;  // with it any QP can go to any endpoint
          begin_destroy();
        }
        continue;
      case State::kDestroy:
        if (!destroy(budget)) return false;
        if (error_) return *error_;
        state_ = State::kCreateCqs;
        continue;
      case State::kComplete:
        break;
    }
    if (!done) {
      error_ = done.error();
      begin_destroy();
      continue;
    }
    if (!*done) return false;
    next_ = 0;
    state_ = static_cast<State>(static_cast<int>(state_) + 1);
  }
  return true;
}

Result<bool> EndpointBlock::read_ports(VerbBudget& budget) {
  current_ports_.reserve(ports_.size());
  for (; next_ < ports_.size(); ++next_) {
    if (!budget.take(kVerbsOfPort)) return false;
    Result<Port> port = refresh_port(*ports_[next_], config_, LogLevel::kWarn);
    if (!port) return port.error();
    current_ports_.push_back(std::move(*port));
  }
  const auto shared = std::make_shared<const std::vector<Port>>(current_ports_);
  for (Endpoint& endpoint : endpoints_) {
    endpoint.ece_ = config_.ece;
    endpoint.current_ports_ = shared;
    endpoint.ports_.clear();
    for (const Port& port : *shared) endpoint.ports_.push_back(&port);
    endpoint.qps_.resize(sizes_.qps);
  }
  return true;
}

Result<bool> EndpointBlock::create_cqs(VerbBudget& budget) {
  const std::size_t devices = ports_.size();
  const std::size_t sharing = layout_ == CqLayout::kPerQp ? 1 : (sizes_.qps + devices - 1) / devices;
  const std::size_t work = sharing * (std::size_t{sizes_.caps.send_wr} + sizes_.caps.recv_wr);
  const std::size_t cqs = layout_ == CqLayout::kPerQp ? std::max(sizes_.qps, devices) : devices;
  for (; next_ < endpoints_.size(); ++next_) {
    Endpoint& endpoint = endpoints_[next_];
    endpoint.cqs_.reserve(cqs);
    while (endpoint.cqs_.size() < cqs) {
      if (!budget.take(1)) return false;
      Result<UniqueCq> cq =
          create_cq(*endpoint.ports_[endpoint.cqs_.size() % devices], work + sizes_.extra_completions);
      if (!cq) return cq.error();
      endpoint.cqs_.push_back(std::move(*cq));
    }
  }
  return true;
}

Result<bool> EndpointBlock::create_qps(VerbBudget& budget) {
  for (; next_ < order_.size(); ++next_) {
    if (!budget.take(kVerbsOfQp)) return false;
    const Position& position = order_[next_];
    Result<EndpointQp> made = create_qp(endpoints_[position.endpoint], position.qp);
    if (!made) return made.error();
    created_.push_back({position, std::move(*made)});
  }
  return true;
}

Result<EndpointQp> EndpointBlock::create_qp(const Endpoint& endpoint, std::size_t qp) const {
  const std::size_t device = qp % ports_.size();
  const Port& port = *endpoint.ports_[device];
  ibv_cq* cq = endpoint.cqs_[qp % endpoint.cqs_.size()].get();
  Result<RcQp> created = make_qp(port, cq, sizes_.caps, config_);
  if (!created) return created.error();
  return EndpointQp{*std::move(created), {.device = static_cast<std::uint8_t>(device)}, nullptr};
}

// The QPs were created in the order of the block. A device may still give out numbers in another order (numbers that
// became free, other processes): so the QPs of each device are sorted by number, and then each endpoint gets those at
// its positions.
bool EndpointBlock::distribute() {
  const bool movable = layout_ == CqLayout::kPerQp || sizes_.qps <= ports_.size();  // each QP has a CQ of its own
  std::vector<std::vector<Created*>> sorted(ports_.size());                         // by device
  for (Created& one : created_) sorted[one.qp.device].push_back(&one);
  for (std::vector<Created*>& device : sorted) {
    std::sort(device.begin(), device.end(),
              [](const Created* a, const Created* b) { return a->qp.qp->qp_num < b->qp.qp->qp_num; });
  }
  std::vector<Created*> at(order_.size());  // the QP for each position
  std::vector<std::size_t> used(ports_.size());
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const std::size_t device = order_[i].qp % ports_.size();
    at[i] = sorted[device][used[device]++];
    if (!movable && at[i]->position.endpoint != order_[i].endpoint) return false;
  }
  std::vector<UniqueCq> cqs(order_.size());
  for (std::size_t i = 0; movable && i < order_.size(); ++i) {
    const Position& from = at[i]->position;
    cqs[i] = std::move(endpoints_[from.endpoint].cqs_[from.qp]);
  }
  for (std::size_t i = 0; i < order_.size(); ++i) {
    Endpoint& endpoint = endpoints_[order_[i].endpoint];
    if (movable) endpoint.cqs_[order_[i].qp] = std::move(cqs[i]);
    endpoint.qps_[order_[i].qp] = std::move(at[i]->qp);
  }
  created_.clear();
  return true;
}

void EndpointBlock::begin_destroy() {
  std::size_t qps = created_.size();
  std::size_t cqs = 0;
  for (const Endpoint& endpoint : endpoints_) {
    qps += endpoint.qps_.size();
    cqs += endpoint.cqs_.size();
  }
  destroyed_qps_.reserve(qps);
  destroyed_cqs_.reserve(cqs);
  state_ = State::kDestroy;
  next_ = 0;
  for (Created& one : created_) destroyed_qps_.push_back(std::move(one.qp.qp));
  created_.clear();
  for (Endpoint& endpoint : endpoints_) {
    for (EndpointQp& end : endpoint.qps_) {
      if (end.qp != nullptr) destroyed_qps_.push_back(std::move(end.qp));
    }
    for (UniqueCq& cq : endpoint.cqs_) destroyed_cqs_.push_back(std::move(cq));
    endpoint.cqs_.clear();
  }
}

bool EndpointBlock::destroy(VerbBudget& budget) {
  while (!destroyed_qps_.empty() || !destroyed_cqs_.empty()) {
    if (!budget.take(1)) return false;
    if (!destroyed_qps_.empty()) {
      destroyed_qps_.pop_back();
    } else {
      destroyed_cqs_.pop_back();
    }
  }
  return true;
}

}  // namespace verbatim
