#include "net/comm.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/net.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kLastArrivalsNs = 200 * kNanosecondsPerMillisecond;

}  // namespace

Comm::Comm(CommKind kind, Context& context, Endpoint endpoint, ControlMemory control)
    : context_(context),
      control_(std::move(control)),
      endpoint_(std::move(endpoint)),
      first_cq_(endpoint_.cqs().front().get()),
      kind_(kind) {
  if (endpoint_.cqs().size() > 1) set_attention(kMoreQueues);
}

wire::Hello Comm::hello() const {
  wire::Hello hello;
  hello.control_address = reinterpret_cast<std::uint64_t>(written_by_peer());
  hello.capabilities = capabilities();
  hello.host = context_.host_name();
  endpoint_.describe(hello);
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
  stats.device = endpoint_.ports().front()->name;
  stats.peer_host = endpoint_.remote().host;
  stats.peer_process = endpoint_.remote().identity.process_id;
  stats.qps = endpoint_.qps().size();
  stats.carried = carried();
  return stats;
}

bool Comm::uses(const Device& device) const {
  return std::any_of(endpoint_.ports().begin(), endpoint_.ports().end(),
                     [&](const Port* port) { return port->device == &device; });
}

bool Comm::uses(const ibv_qp& qp) const {
  return std::any_of(endpoint_.qps().begin(), endpoint_.qps().end(),
                     [&](const EndpointQp& end) { return end.qp.get() == &qp; }) ||
         flushes_with(qp);
}

bool Comm::uses(const ibv_cq& cq) const {
  return std::any_of(endpoint_.cqs().begin(), endpoint_.cqs().end(),
                     [&](const UniqueCq& own) { return own.get() == &cq; });
}

bool Comm::qps_stand() const {
  return std::all_of(endpoint_.qps().begin(), endpoint_.qps().end(), [&](const EndpointQp& end) {
    ibv_qp_attr now{};
    ibv_qp_init_attr made{};
    const Verbs& verbs = endpoint_.ports()[end.device]->device->verbs();
    return verbs.query_qp(end.qp.get(), &now, IBV_QP_STATE, &made) == 0 && now.qp_state != IBV_QPS_ERR;
  });
}

void Comm::abort() {
  for (const EndpointQp& end : endpoint_.qps()) {
    if (const Status stopped = to_error(end.qp.get(), *endpoint_.ports()[end.device]->device); !stopped) {
      VERBATIM_INFO("%s to ERR failed with %s", stopped.error().operation, std::strerror(stopped.error().sys_errno));
    }
  }
}

[[gnu::cold]] void Comm::obey_signals(bool starved) noexcept {
  const std::uint32_t signals = attention_.load(std::memory_order_acquire);
  if ((signals & static_cast<std::uint32_t>(CommSignal::kDeviceFailed)) != 0) {
    return fail(ErrorKind::kSystem, "device",
                [&] { return "the device reported a fatal event on " + endpoint_.describe_path(0); });
  }
  const bool gone = (signals & static_cast<std::uint32_t>(CommSignal::kPeerGone)) != 0;
  if (!starved && (gone ? quiet() : !needs_peer())) return;
  // The news came by TCP: what the peer did before it may still be under way.
  const std::uint64_t now = monotonic_ns();
  if (peer_end_seen_ns_ == 0) peer_end_seen_ns_ = now;
  if (now - peer_end_seen_ns_ < kLastArrivalsNs) return;
  fail(ErrorKind::kRemote, "peer", [&] {
    return (gone ? "the peer's process ended, or gave up, without closing " : "the peer has closed ") +
           endpoint_.describe_path(0) + " while we wait for it";
  });
}

[[gnu::cold]] bool Comm::begin_failure(ErrorKind kind, const char* operation) noexcept {
  if (failure_ != ErrorKind::kNone) return false;
  failure_ = kind;
  error_ = {kind, 0, operation, true};
  set_attention(kFailed);
  return true;
}

void Comm::log_failure(const std::string& what) {
  VERBATIM_WARN("%s", what.c_str());
}

void Comm::log_failure_without_memory() {
  VERBATIM_WARN("a connection failed, and there is no memory to say how");
}

[[gnu::cold]] void Comm::fail_poll() noexcept {
  fail(ErrorKind::kSystem, "ibv_poll_cq", [&] { return "ibv_poll_cq failed on " + endpoint_.describe_path(0); });
}

std::string Comm::describe_completion(const ibv_wc& completion, std::size_t qp, const std::string& operation) const {
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[qp].device]->device->verbs();
  char what[768];
  std::snprintf(what, sizeof what, "%s failed with %s (%d, vendor error %u) on %s", operation.c_str(),
                verbs.wc_status_str(completion.status), completion.status, completion.vendor_err,
                endpoint_.describe_path(qp).c_str());
  return what;
}

[[gnu::cold]] void Comm::fail_post(const char* operation, int returned, std::size_t qp) noexcept {
  fail(ErrorKind::kSystem, operation, [&] {
    const Status status = check_errno(operation, returned);
    char what[640];
    std::snprintf(what, sizeof what, "%s failed with %s on %s", operation, std::strerror(status.error().sys_errno),
                  endpoint_.describe_path(qp).c_str());
    return std::string(what);
  });
}

}  // namespace verbatim
