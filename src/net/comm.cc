#include "net/comm.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/control.h"
#include "net/net.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kLastArrivalsNs = 200 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kLastEventsNs = 50 * kNanosecondsPerMillisecond;
constexpr unsigned kEventPauseUs = 1000;

// Whose failure a status speaks of.
ErrorKind failure_of(ibv_wc_status status) {
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
  hello.pid = static_cast<std::uint32_t>(::getpid());
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

bool Comm::uses(const Device& device, std::uint8_t port_num) const {
  return std::any_of(endpoint_.ports().begin(), endpoint_.ports().end(), [&](const Port* port) {
    return port->device == &device && (port_num == 0 || port->port_num == port_num);
  });
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

bool Comm::qps_stand() const {
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

[[gnu::cold]] void Comm::obey_signals(bool starved) noexcept {
  const std::uint32_t signals = attention_.load(std::memory_order_acquire);
  if ((signals & static_cast<std::uint32_t>(CommSignal::kDeviceFailed)) != 0) {
    return fail(ErrorKind::kSystem, "device", [&] { return describe_event(); });
  }
  const bool condemned = (signals & static_cast<std::uint32_t>(CommSignal::kCondemned)) != 0;
  const bool ended = condemned || (signals & static_cast<std::uint32_t>(CommSignal::kPeerFailed)) != 0;
  const bool gave_up = (signals & static_cast<std::uint32_t>(CommSignal::kPeerGaveUp)) != 0;
  const bool gone = gave_up || (signals & static_cast<std::uint32_t>(CommSignal::kPeerGone)) != 0;
  // A send that is under way needs its acknowledgement of a peer that is gone; a receive, or its flush, nothing but
  // data.
  const bool content = gone && kind_ == CommKind::kSend ? quiet() : !needs_peer();
  if (!starved && !ended && content) return;
  // The news came by TCP: what the peer did before it may still be under way.
  const std::uint64_t now = monotonic_ns();
  if (peer_end_seen_ns_ == 0) peer_end_seen_ns_ = now;
  if (!condemned && now - peer_end_seen_ns_ < kLastArrivalsNs) return;
  if (ended) {
    return fail(verdict_kind_, "peer", [&] {
      const bool ours = condemned && verdict_kind_ == ErrorKind::kSystem;
      return describe_failure(verdict(),
                              {"", ours ? "look at this process and its device"
                                        : "look at " + endpoint_.peer_name() + " first: its log says more"},
                              facts(0));
    });
  }
  fail(ErrorKind::kRemote, "peer", [&] {
    const PathFacts path = facts(0);
    const std::string peer = endpoint_.peer_name();
    const char* const did = gave_up ? " has given up" : gone ? " has ended without closing" : " has closed";
    return describe_failure("the peer " + peer + did + " a connection that we wait for",
                            {gave_up ? "its application closed it with work outstanding: the peer went first"
                             : gone  ? "its process or host died, or was killed: the peer went first"
                                     : "it needs nothing more of us: the application's ends disagree",
                             "look at " + peer + " first: its log says why"},
                            path);
  });
}

[[gnu::cold]] bool Comm::begin_failure(ErrorKind kind, const char* operation) noexcept {
  if (failure_ != ErrorKind::kNone) return false;
  failure_ = kind;
  error_ = {kind, 0, operation, true};
  set_attention(kFailed);
  return true;
}

void Comm::pass_verdict(ErrorKind kind, std::string_view why) {
  verdict_kind_ = kind;
  verdict_.reset(new (std::nothrow) char[why.size() + 1]);
  if (verdict_ == nullptr) return;
  std::copy_n(why.begin(), why.size(), verdict_.get());
  verdict_[why.size()] = '\0';
}

void Comm::tell_peer() noexcept {
  failure_told_.store(true, std::memory_order_release);
  if (watcher_ != nullptr) watcher_->wake();
}

void Comm::report(std::string what) noexcept {
  VERBATIM_WARN("%s", what.c_str());
  const std::size_t told = what.find(kNextStep);  // the rest is for our operator alone
  failure_text_ = std::move(what);
  if (told != std::string::npos) failure_text_.resize(told);
  try {
    constexpr std::string_view kHere = " here";  // which is elsewhere for who reads it there
    for (std::size_t at = 0; (at = failure_text_.find(kHere, at)) != std::string::npos;) {
      failure_text_.replace(at, kHere.size(), " on " + context_.host_name());
    }
  } catch (...) {  // no memory: it says so to somebody who can guess
  }
  tell_peer();
}

void Comm::report_without_memory() noexcept {
  VERBATIM_WARN("a connection failed, and there is no memory to say how");
  tell_peer();
}

[[gnu::cold]] void Comm::fail_poll() noexcept {
  fail(ErrorKind::kSystem, "ibv_poll_cq", [&] {
    const PathFacts path = facts(0);
    return describe_failure("ibv_poll_cq failed", diagnose(IBV_EVENT_CQ_ERR, path), path);
  });
}

PathFacts Comm::facts(std::size_t qp) const {
  PathFacts facts = endpoint_.path_facts(qp, context_.host_name());
  facts.delivered = delivered();
  constexpr std::uint32_t kPeerEnded = static_cast<std::uint32_t>(CommSignal::kPeerClosed) |
                                       static_cast<std::uint32_t>(CommSignal::kPeerGone) |
                                       static_cast<std::uint32_t>(CommSignal::kPeerGaveUp);
  const std::uint32_t signals = attention_.load(std::memory_order_acquire);
  facts.peer_gone = (signals & kPeerEnded) != 0;
  if ((signals & static_cast<std::uint32_t>(CommSignal::kPeerFailed)) != 0) facts.peer_report = verdict();
  return facts;
}

std::string Comm::explain_setup(const Error& error) const {
  const PathFacts path = facts(0);
  return verbatim::explain_setup(error, &path);
}

std::string Comm::describe_path(std::size_t qp) const {
  return endpoint_.describe_path(qp, context_.host_name());
}

std::string Comm::describe_event() const {
  const ibv_event_type event = event_.load(std::memory_order_relaxed);
  const PathFacts path = facts(0);
  const Verbs& verbs = endpoint_.ports().front()->device->verbs();
  return describe_failure(
      path.local.device + " reported " + verbs.event_type_str(event) + " (" + event_name(event) + ")",
      diagnose(event, path), path);
}

[[gnu::cold]] void Comm::fail_completion(const ibv_wc& completion, std::size_t qp, const FailedWork& work) noexcept {
  const bool flushed = completion.status == IBV_WC_WR_FLUSH_ERR;
  const bool first = begin_failure(failure_of(completion.status), "completion");
  const bool cause = first || (unreported_ && !flushed && failed_.completion.status == IBV_WC_WR_FLUSH_ERR);
  if (cause) {
    if (!first) {  // what came before was only its consequence
      ++flushed_;
      failure_ = error_.kind = failure_of(completion.status);
    }
    failed_ = {completion, qp, work};
    unreported_ = true;
  } else if (flushed) {
    ++flushed_;
  }
}

// What only follows from something else: the device's event that names the cause may come a moment later.
bool Comm::await_event() const {
  const std::uint64_t end = monotonic_ns() + kLastEventsNs;
  while ((attention() & kSignals) == 0 && monotonic_ns() < end) ::usleep(kEventPauseUs);
  return (attention() & static_cast<std::uint32_t>(CommSignal::kDeviceFailed)) != 0;
}

[[gnu::cold]] void Comm::report_completion() noexcept try {
  unreported_ = false;
  if (failed_.completion.status == IBV_WC_WR_FLUSH_ERR && await_event()) return report(describe_event());
  PathFacts path = facts(failed_.qp);
  path.buffer = failed_.work.buffer;
  if (failed_.work.loopback) {
    path.local.qp = failed_.completion.qp_num;
    path.remote = path.local;
  }
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[failed_.qp].device]->device->verbs();
  report(describe_failure(
      describe_completion(failed_.completion, verbs.wc_status_str(failed_.completion.status), failed_.work, flushed_),
      diagnose(failed_.completion.status, path), path));
} catch (...) {
  report_without_memory();
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
