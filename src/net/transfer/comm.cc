#include "net/transfer/comm.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kArrivalGraceNs = 200 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kEventWaitNs = 50 * kNanosecondsPerMillisecond;
constexpr unsigned kEventPollIntervalUs = 1000;

// Whose failure a status speaks of.
ErrorKind error_kind_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_GENERAL_ERR:
      return ErrorKind::kSystem;
    default:
      return ErrorKind::kRemote;
  }
}

}  // namespace

Comm::Comm(CommKind kind, const CommSettings& settings, Endpoint endpoint, ControlMemory control)
    : settings_(settings),
      control_(std::move(control)),
      endpoint_(std::move(endpoint)),
      first_cq_(endpoint_.cqs().front().get()),
      kind_(kind) {
  if (endpoint_.cqs().size() > 1) set_slow_path_flag(kSeveralCqs);
}

wire::Hello Comm::hello() const {
  wire::Hello hello;
  hello.control_address = reinterpret_cast<std::uint64_t>(peer_written_memory());
  hello.capabilities = capabilities();
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
  stats.device = endpoint_.ports().front()->name;
  stats.peer_host = endpoint_.remote().host;
  stats.peer_process = endpoint_.remote().identity.process_id;
  stats.qps = endpoint_.qps().size();
  stats.transfer_counts = transfer_counts();
  return stats;
}

bool Comm::uses(const Device& device, std::uint8_t port_num) const {
  return std::any_of(endpoint_.ports().begin(), endpoint_.ports().end(), [&](const Port* port) {
    return port->device == &device && (port_num == 0 || port->port_num == port_num);
  });
}

bool Comm::uses(const ibv_qp& qp) const {
  return std::any_of(endpoint_.qps().begin(), endpoint_.qps().end(),
                     [&](const EndpointQp& end) { return end.qp.get() == &qp; }) ||
         uses_for_flush(qp);
}

bool Comm::uses(const ibv_cq& cq) const {
  return std::any_of(endpoint_.cqs().begin(), endpoint_.cqs().end(),
                     [&](const UniqueCq& own) { return own.get() == &cq; });
}

ibv_qp_state Comm::qp_state() const {
  ibv_qp_state found = IBV_QPS_RTS;
  for (const EndpointQp& end : endpoint_.qps()) {
    ibv_qp_attr now{};
    ibv_qp_init_attr made{};
    const Verbs& verbs = endpoint_.ports()[end.device]->device->verbs();
    if (verbs.query_qp(end.qp.get(), &now, IBV_QP_STATE, &made) != 0) return IBV_QPS_UNKNOWN;
    if (now.qp_state == IBV_QPS_ERR) return now.qp_state;
    if (found == IBV_QPS_RTS) found = now.qp_state;
  }
  return found;
}

bool Comm::qps_usable() const {
  const ibv_qp_state state = qp_state();
  return state != IBV_QPS_ERR && state != IBV_QPS_UNKNOWN;
}

void Comm::abort() {
  for (const EndpointQp& end : endpoint_.qps()) {
    if (const Status stopped = to_error(end.qp.get(), *endpoint_.ports()[end.device]->device); !stopped) {
      VERBATIM_INFO("%s to ERR failed with %s", stopped.error().operation, std::strerror(stopped.error().sys_errno));
    }
  }
}

[[gnu::cold]] void Comm::process_signals(bool waits_for_message) noexcept {
  const std::uint32_t signals = slow_path_flags_.load(std::memory_order_acquire);
  if ((signals & static_cast<std::uint32_t>(CommSignal::kDeviceFailed)) != 0) {
    return fail(ErrorKind::kSystem, "device", [&] { return describe_event(); });
  }
  const bool failed_by_monitor = (signals & static_cast<std::uint32_t>(CommSignal::kFailedByMonitor)) != 0;
  const bool ended = failed_by_monitor || (signals & static_cast<std::uint32_t>(CommSignal::kPeerFailed)) != 0;
  const bool aborted = (signals & static_cast<std::uint32_t>(CommSignal::kPeerAborted)) != 0;
  const bool disconnected = aborted || (signals & static_cast<std::uint32_t>(CommSignal::kPeerDisconnected)) != 0;
  // A send that is under way needs its acknowledgement of a peer that is gone; a receive, or its flush, nothing but
  // data.
  const bool nothing_pending = disconnected && kind_ == CommKind::kSend ? all_done() : !waits_for_peer();
  if (!waits_for_message && !ended && nothing_pending) return;
  // The news came by TCP: what the peer did before it may still be under way.
  const std::uint64_t now = monotonic_ns();
  if (peer_end_detected_ns_ == 0) peer_end_detected_ns_ = now;
  if (!failed_by_monitor && now - peer_end_detected_ns_ < kArrivalGraceNs) return;
  if (ended) {
    return fail(failure_reason_kind_, "peer", [&] {
      const bool ours = failed_by_monitor && failure_reason_kind_ == ErrorKind::kSystem;
      return describe_failure(failure_reason(),
                              {"", ours ? "look at this process and its device"
                                        : "look at " + endpoint_.peer_name() + " first: its log says more"},
                              facts(0));
    });
  }
  fail(ErrorKind::kRemote, "peer", [&] {
    const PathFacts path = facts(0);
    const std::string peer = endpoint_.peer_name();
    const char* const did = aborted ? " has given up" : disconnected ? " has ended without closing" : " has closed";
    return describe_failure("the peer " + peer + did + " a connection that we wait for",
                            {aborted        ? "its application closed it with work outstanding: the peer went first"
                             : disconnected ? "its process or host died, or was killed: the peer went first"
                                            : "it needs nothing more of us: the application's ends disagree",
                             "look at " + peer + " first: its log says why"},
                            path);
  });
}

[[gnu::cold]] bool Comm::record_failure(ErrorKind kind, const char* operation) noexcept {
  if (failure_ != ErrorKind::kNone) return false;
  failure_ = kind;
  error_ = {kind, 0, operation, true};
  set_slow_path_flag(kFailed);
  return true;
}

void Comm::set_failure_reason(ErrorKind kind, std::string_view why) {
  failure_reason_kind_ = kind;
  failure_reason_.reset(new (std::nothrow) char[why.size() + 1]);
  if (failure_reason_ == nullptr) return;
  std::copy_n(why.begin(), why.size(), failure_reason_.get());
  failure_reason_[why.size()] = '\0';
}

void Comm::publish_failure() noexcept {
  failure_published_.store(true, std::memory_order_release);
  if (observer_ != nullptr) observer_->comm_failed(*this);
}

void Comm::log_failure(std::string what) noexcept {
  VERBATIM_WARN("%s", what.c_str());
  const std::size_t end_of_peer_part = what.find(kNextStep);  // the rest is for our operator alone
  failure_text_ = std::move(what);
  if (end_of_peer_part != std::string::npos) failure_text_.resize(end_of_peer_part);
  try {
    constexpr std::string_view kLocalWord = " here";  // which is elsewhere for who reads it there
    for (std::size_t at = 0; (at = failure_text_.find(kLocalWord, at)) != std::string::npos;) {
      failure_text_.replace(at, kLocalWord.size(), " on " + settings_.host_name);
    }
  } catch (...) {  // no memory: it says so to somebody who can guess
  }
  publish_failure();
}

void Comm::log_failure_without_memory() noexcept {
  VERBATIM_WARN("a connection failed, and there is no memory to say how");
  publish_failure();
}

[[gnu::cold]] void Comm::fail_poll() noexcept {
  fail(ErrorKind::kSystem, "ibv_poll_cq", [&] {
    const PathFacts path = facts(0);
    return describe_failure("ibv_poll_cq failed", diagnose(IBV_EVENT_CQ_ERR, path), path);
  });
}

PathFacts Comm::facts(std::size_t qp) const {
  PathFacts facts = endpoint_.path_facts(qp, settings_.host_name);
  facts.completed_counts = completed_counts();
  constexpr std::uint32_t kPeerEnded = static_cast<std::uint32_t>(CommSignal::kPeerClosed) |
                                       static_cast<std::uint32_t>(CommSignal::kPeerDisconnected) |
                                       static_cast<std::uint32_t>(CommSignal::kPeerAborted);
  const std::uint32_t signals = slow_path_flags_.load(std::memory_order_acquire);
  facts.peer_disconnected = (signals & kPeerEnded) != 0;
  if ((signals & static_cast<std::uint32_t>(CommSignal::kPeerFailed)) != 0) facts.peer_report = failure_reason();
  return facts;
}

std::string Comm::explain_setup_error(const Error& error) const {
  const PathFacts path = facts(0);
  return verbatim::explain_setup_error(error, &path);
}

std::string Comm::describe_path(std::size_t qp) const {
  return endpoint_.describe_path(qp, settings_.host_name);
}

std::string Comm::describe_event() const {
  const ibv_event_type event = device_event_.load(std::memory_order_relaxed);
  const PathFacts path = facts(0);
  const Verbs& verbs = endpoint_.ports().front()->device->verbs();
  return describe_failure(
      path.local.device + " reported " + verbs.event_type_str(event) + " (" + event_name(event) + ")",
      diagnose(event, path), path);
}

[[gnu::cold]] void Comm::fail_completion(const ibv_wc& completion, std::size_t qp, const FailedWork& work) noexcept {
  const bool flushed = completion.status == IBV_WC_WR_FLUSH_ERR;
  const bool first = record_failure(error_kind_of(completion.status), "completion");
  const bool cause =
      first || (completion_failure_pending_ && !flushed && failed_completion_.completion.status == IBV_WC_WR_FLUSH_ERR);
  if (cause) {
    if (!first) {  // what came before was only its consequence
      ++flushed_count_;
      failure_ = error_.kind = error_kind_of(completion.status);
    }
    failed_completion_ = {completion, qp, work};
    completion_failure_pending_ = true;
  } else if (flushed) {
    ++flushed_count_;
  }
}

// What only follows from something else: the device's event that names the cause may come a moment later.
bool Comm::wait_for_device_event() const {
  const std::uint64_t end = monotonic_ns() + kEventWaitNs;
  while ((slow_path_flags() & kSignals) == 0 && monotonic_ns() < end) ::usleep(kEventPollIntervalUs);
  return (slow_path_flags() & static_cast<std::uint32_t>(CommSignal::kDeviceFailed)) != 0;
}

[[gnu::cold]] void Comm::log_completion_failure() noexcept try {
  completion_failure_pending_ = false;
  if (failed_completion_.completion.status == IBV_WC_WR_FLUSH_ERR && wait_for_device_event())
    return log_failure(describe_event());
  PathFacts path = facts(failed_completion_.qp);
  path.buffer = failed_completion_.work.buffer;
  if (failed_completion_.work.loopback) {
    path.local.qp = failed_completion_.completion.qp_num;
    path.remote = path.local;
  }
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[failed_completion_.qp].device]->device->verbs();
  log_failure(describe_failure(
      describe_completion(failed_completion_.completion, verbs.wc_status_str(failed_completion_.completion.status),
                          failed_completion_.work, flushed_count_),
      diagnose(failed_completion_.completion.status, path), path));
} catch (...) {
  log_failure_without_memory();
}

[[gnu::cold]] void Comm::fail_post(const char* operation, int returned, std::size_t qp) noexcept {
  fail(ErrorKind::kSystem, operation, [&] {
    const Status status = check_errno(operation, returned);
    const PathFacts path = facts(qp);
    return describe_failure(std::string(operation) + " failed with " + std::strerror(status.error().sys_errno),
                            diagnose(IBV_EVENT_QP_FATAL, path), path);
  });
}

}  // namespace verbatim
