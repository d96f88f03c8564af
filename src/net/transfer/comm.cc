#include "net/transfer/comm.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

bool is_same(const GidEntry& a, const GidEntry& b) {
  return a.index == b.index && std::memcmp(a.gid.raw, b.gid.raw, sizeof a.gid.raw) == 0;
}

}  // namespace

Comm::Comm(CommKind kind, const CommSettings& settings, Endpoint endpoint, ControlMemory control)
    : settings_(settings),
      control_(std::move(control)),
      endpoint_(std::move(endpoint)),
      first_cq_(endpoint_.cqs().front().get()),
      kind_(kind) {
  if (endpoint_.cqs().size() > 1) failure_state_.set_flag(kSeveralCqs);
}

wire::Hello Comm::hello() const {
  wire::Hello hello;
  hello.control_address = reinterpret_cast<std::uint64_t>(peer_written_memory());
  hello.capabilities = capabilities() | (settings_.config.failover ? wire::kFailover : 0U) |
                       (settings_.config.reconnect_s != 0 ? wire::kReconnect : 0U);
  hello.host = settings_.host_name;
  hello.pid = static_cast<std::uint32_t>(::getpid());
  endpoint_.add_to_hello(hello);
  for (std::size_t i = 0; i < hello.devices.size(); ++i) hello.devices[i].control_rkey = control_.rkey(i);
  return hello;
}

Result<std::unique_ptr<MemoryHandle>> Comm::register_memory(const MrRequest& request) {
  return verbatim::register_memory(endpoint_.ports(), request);
}

ConnectionStats Comm::stats() const {
  ConnectionStats stats;
  stats.sends = kind_ == CommKind::kSend;
  stats.atomic = (capabilities() & endpoint_.remote().capabilities & wire::kAtomicCompletion) != 0;
  stats.device = join_names(endpoint_.ports());
  stats.peer_host = endpoint_.remote().host;
  stats.peer_process = endpoint_.remote().identity.process_id;
  stats.qps = endpoint_.qps().size();
  stats.lanes = endpoint_.lanes();
  stats.lanes_down = lanes_down();
  if (failover_ != nullptr) stats.outages = failover_->outages();
  stats.transfer_counts = transfer_counts();
  stats.latency = latencies();
  return stats;
}

std::unique_ptr<ProfilerEvents> Comm::make_profiler_events() const {
  if (!settings_.config.profiler || settings_.profiler.callback == nullptr) return nullptr;
  return std::make_unique<ProfilerEvents>(settings_.profiler);
}

void Comm::set_device_event(ibv_event_type event, const Device& device) {
  // An earlier one says more; that of a device stays, also while the data path takes the event of a QP back.
  const ibv_event_type earlier = failure_state_.device_event();
  const bool is_final = earlier == IBV_EVENT_DEVICE_FATAL || earlier == IBV_EVENT_CQ_ERR;
  if (is_qp_event(event) && (is_final || failure_state_.has(CommEvent::kDeviceFailed))) return;
  const std::span<const Port* const> ports = endpoint_.ports();
  const auto port = std::find_if(ports.begin(), ports.end(), [&](const Port* one) { return one->device == &device; });
  failure_state_.set_device_event(event, endpoint_.qp_on_port(static_cast<std::size_t>(port - ports.begin())));
}

bool Comm::uses(const Device& device, std::uint8_t port_num) const {
  return std::any_of(endpoint_.ports().begin(), endpoint_.ports().end(), [&](const Port* port) {
    return port->device == &device && (port_num == 0 || port->port_num == port_num);
  });
}

bool Comm::uses(const ibv_qp& qp) const {
  const MutexLock lock(qps_mutex_);
  return std::any_of(endpoint_.qps().begin(), endpoint_.qps().end(),
                     [&](const EndpointQp& end) { return end.qp.get() == &qp; }) ||
         uses_for_flush(qp);
}

bool Comm::uses(const ibv_cq& cq) const {
  return std::any_of(endpoint_.cqs().begin(), endpoint_.cqs().end(),
                     [&](const UniqueCq& own) { return own.get() == &cq; });
}

std::vector<GidEntry> Comm::gids(const Device& device, std::uint8_t port_num) const {
  std::vector<GidEntry> used;
  const MutexLock lock(qps_mutex_);
  for (std::size_t qp = 0; qp < endpoint_.qps().size(); ++qp) {
    if (!is_on(qp, device, port_num) || !works(qp)) continue;
    const GidEntry& gid = endpoint_.gid(qp);
    if (std::ranges::none_of(used, [&](const GidEntry& known) { return is_same(known, gid); })) used.push_back(gid);
  }
  return used;
}

bool Comm::is_on(std::size_t qp, const Device& device, std::uint8_t port_num) const {
  const Port& port = *endpoint_.ports()[endpoint_.qps()[qp].device];
  return port.device == &device && port.port_num == port_num;
}

ibv_qp_state Comm::query_state(const EndpointQp& end) const {
  ibv_qp_attr now{};
  ibv_qp_init_attr made{};
  const Verbs& verbs = endpoint_.ports()[end.device]->device->verbs();
  ibv_qp* qp = nullptr;
  {
    const MutexLock lock(qps_mutex_);
    qp = end.qp.get();
  }
  return verbs.query_qp(qp, &now, IBV_QP_STATE, &made) == 0 ? now.qp_state : IBV_QPS_UNKNOWN;
}

ibv_qp_state Comm::qp_state() const {
  ibv_qp_state found = IBV_QPS_RTS;
  for (std::size_t qp = 0; qp < endpoint_.qps().size(); ++qp) {
    if (!works(qp)) continue;
    const ibv_qp_state state = query_state(endpoint_.qps()[qp]);
    if (state == IBV_QPS_UNKNOWN || state == IBV_QPS_ERR) return state;
    if (found == IBV_QPS_RTS) found = state;
  }
  return found;
}

const Device* Comm::failed_device() const {
  for (const EndpointQp& end : endpoint_.qps()) {
    const ibv_qp_state state = query_state(end);
    if (state == IBV_QPS_UNKNOWN || state == IBV_QPS_ERR) return endpoint_.ports()[end.device]->device;
  }
  return nullptr;
}

void Comm::abort() {
  for (const EndpointQp& end : endpoint_.qps()) {
    if (const Status stopped = to_error(end.qp.get(), *endpoint_.ports()[end.device]->device); !stopped) {
      VERBATIM_INFO("%s to ERR failed with %s", stopped.error().operation, std::strerror(stopped.error().sys_errno));
    }
  }
}

void Comm::gid_changed(const Device& device, std::uint8_t port_num, const GidEntry& gid) {
  if (failover_ == nullptr) return;
  LaneNotices::Lanes lanes = 0;
  {
    const MutexLock lock(qps_mutex_);
    for (std::size_t lane = 0; lane < failover_->lanes(); ++lane) {
      const std::size_t qp = failover_->lane(lane).qps.front();
      if (is_on(qp, device, port_num) && is_same(endpoint_.gid(qp), gid)) lanes |= LaneNotices::Lanes{1} << lane;
    }
  }
  receive_event(lanes);
}

std::string Comm::describe_path(std::size_t qp) const {
  const MutexLock lock(qps_mutex_);
  return endpoint_.describe_path(qp, settings_.host_name);
}

}  // namespace verbatim
