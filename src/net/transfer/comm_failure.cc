// How a comm fails: what is recorded, logged and passed to the observer. Nothing here runs while all is well.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/log.h"
#include "net/transfer/comm.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

// Data, completions, events of the device and messages of the peer come by different ways. What names the cause, and
// data that the peer sent before it ended, may come this much later than the first sign of a failure.
constexpr std::uint64_t kLateCauseNs = 200 * kNanosecondsPerMillisecond;
constexpr unsigned kEventPollIntervalUs = 1000;

}  // namespace

// On the first QP of each port that works (QP j is on port j modulo their number), and on the one that carries the CTS
// entries. In each the answer of the peer's NIC comes behind the work that was posted before.
void Comm::post_probes() noexcept {
  if (error() != nullptr || probes_left_ != 0) return failure_state_.clear_event(CommEvent::kProbePeer);
  std::uint32_t asked = 0;  // ports, one bit each
  for (std::size_t qp = 0; qp < endpoint_.qps().size(); ++qp) {
    const std::uint32_t port = 1U << qp % endpoint_.ports().size();
    if (((asked & port) != 0 && !carries_cts(qp)) || !works(qp)) continue;
    int returned = 0;
    if (!post_probe(qp, returned)) continue;
    if (returned != 0) return fail_post("ibv_post_send", returned, qp);
    failure_state_.clear_event(CommEvent::kProbePeer);
    failure_state_.set_flag(kProbing);
    probes_left_ += 1;
    asked |= port;
  }
}

void Comm::process_events(bool waits_for_message) noexcept {
  if ((slow_path_flags() & kProbing) != 0 && !waits_for_message) ++polls_without_answer_;  // waits: the poll is counted
  // bnxt_re and irdma raise one when the retries are used up.
  if (failover_ != nullptr && failover_->waits && failure_state_.clear_qp_event()) device_event_ns_ = 0;
  if (failure_state_.has(CommEvent::kDeviceFailed)) {
    if (device_event_ns_ == 0) device_event_ns_ = monotonic_ns();
    // The completion that comes with the event of a QP says more.
    if (is_qp_event(failure_state_.device_event()) && monotonic_ns() - device_event_ns_ < kLateCauseNs) return;
    return fail(ErrorKind::kSystem, "device", [&] { return device_event(); });
  }
  constexpr auto kProbe = static_cast<std::uint32_t>(CommEvent::kProbePeer);
  if ((slow_path_flags() & kProbe) != 0) post_probes();
  if ((slow_path_flags() & kCommEvents & ~kProbe) == 0) return;
  const bool failed_by_monitor = failure_state_.has(CommEvent::kFailedByMonitor);
  const bool has_reason = failed_by_monitor || failure_state_.has(CommEvent::kPeerFailed);
  const bool disconnected = failure_state_.has(CommEvent::kPeerAborted, CommEvent::kPeerDisconnected);
  // After a graceful close an outstanding send may still be acknowledged; without one it never is. An outstanding
  // receive, or its flush, waits for data only.
  const bool nothing_pending = disconnected && kind_ == CommKind::kSend ? all_done() : !waits_for_peer();
  if (!waits_for_message && !has_reason && nothing_pending) return;
  const std::uint64_t now = monotonic_ns();
  if (peer_end_detected_ns_ == 0) peer_end_detected_ns_ = now;
  if (!failed_by_monitor && now - peer_end_detected_ns_ < kLateCauseNs) return;
  const ErrorKind kind = has_reason ? failure_state_.reason_kind() : ErrorKind::kRemote;
  fail(kind, "peer", [&] { return peer_ended(); });
}

Failure Comm::peer_ended() const {
  const PathFacts path = facts(0);
  const std::string peer = endpoint_.peer_name();
  if (failure_state_.has(CommEvent::kFailedByMonitor, CommEvent::kPeerFailed)) {
    const bool by_monitor = failure_state_.has(CommEvent::kFailedByMonitor);
    const bool local = by_monitor && failure_state_.reason_kind() == ErrorKind::kSystem;
    const bool is_cut_off = by_monitor && !local && (failover_ == nullptr || failover_->working() == 0);
    for (std::size_t qp = 0; is_cut_off && qp < endpoint_.qps().size(); ++qp) {
      const PathFacts own = facts(qp);
      if (Diagnosis port = diagnose_port(own); !port.why.empty()) return {failure_state_.reason(), port, own};
    }
    const std::string more = by_monitor ? "its log, and 'ps' on its host, say more" : "its log says more";
    return {failure_state_.reason(),
            {"", local ? "look at this process and its device" : "look at " + peer + " first: " + more},
            path};
  }
  const std::string next = "look at " + peer + " first: its log says why";
  if (failure_state_.has(CommEvent::kPeerAborted)) {
    return {"the peer " + peer + " aborted the connection",
            {"its application closed it with outstanding operations", next},
            path};
  }
  if (failure_state_.has(CommEvent::kPeerDisconnected)) {
    return {"the peer " + peer + " ended without closing a connection that has outstanding operations",
            {"its process was killed or crashed, or its host failed",
             next + ", or 'dmesg' on its host, if it was killed for want of memory"},
            path};
  }
  return {"the peer " + peer + " closed a connection that has outstanding operations",
          {"its application needs no more data, the one on " + settings_.host_name + " does: their calls do not match",
           next},
          path};
}

// The peer's NIC has not answered.
Failure Comm::peer_lost(const FailureState::HeldCompletion& held, const PathFacts& path) const {
  const std::string peer = endpoint_.peer_name();
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[held.qp].device]->device->verbs();
  const std::string completion =
      describe_completion(held.completion, verbs.wc_status_str(held.completion.status), held.work, held.flushed);
  const std::string next = "look at " + peer + " first: " + completion;
  switch (failure_state_.channel_state()) {
    case ChannelState::kNoAnswer:
      return {no_message(peer, failure_state_.channel_detail() * kNanosecondsPerMillisecond, false), {"", next}, path};
    case ChannelState::kLost:
      return {"the peer " + peer + " is lost: its side channel ended with " +
                  std::strerror(static_cast<int>(failure_state_.channel_detail())) + ", and its NIC does not answer",
              {"its process was killed or crashed, its host failed, or the network is cut", next},
              path};
    case ChannelState::kOpen:  // it is made again, or a message has come, since the question was posted
      break;
  }
  return {completion, diagnose(held.completion.status, path), path};
}

Failure Comm::device_event() const {
  const ibv_event_type event = failure_state_.device_event();
  const std::size_t qp = failure_state_.event_qp();
  const PathFacts path = facts(qp);
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[qp].device]->device->verbs();
  return {path.local.device + " on " + path.local.host + " reported " + verbs.event_type_str(event) + " (" +
              event_name(event) + ")",
          diagnose(event, path), path};
}

void Comm::publish(std::unique_ptr<Failure> failure) {
  failure->kind = result();
  failure->operation = error()->operation;
  std::string text = peer_text(*failure);
  VERBATIM_WARN("%s", log_line(*failure).c_str());
  failure_state_.publish(std::move(failure), std::move(text));
  if (observer_ != nullptr) observer_->comm_changed(*this);
}

void Comm::publish_without_memory() noexcept {
  VERBATIM_WARN("a connection failed, and there is no memory to say how");
  failure_state_.publish(nullptr, {});
  if (observer_ != nullptr) observer_->comm_changed(*this);
}

void Comm::fail_poll(std::size_t cq) noexcept {
  fail(ErrorKind::kSystem, "ibv_poll_cq", [&] {
    const PathFacts path = facts(endpoint_.qp_on_port(cq));  // QP j uses CQ j
    return Failure{"ibv_poll_cq failed", diagnose(IBV_EVENT_CQ_ERR, path), path};
  });
}

void Comm::fail_post(const char* operation, int returned, std::size_t qp) noexcept {
  fail(ErrorKind::kSystem, operation, [&] {
    const Status status = check_errno(operation, returned);
    const PathFacts path = facts(qp);
    return Failure{std::string(operation) + " failed with " + std::strerror(status.error().sys_errno),
                   diagnose(IBV_EVENT_QP_FATAL, path), path};
  });
}

void Comm::fail_completion(const ibv_wc& completion, std::size_t qp, const FailedWork& work) noexcept {
  failure_state_.record_completion(error_kind_of(completion.status), completion, qp, work);
}

// The peer's failure notice does not end the wait: the peer reports what the local device refused. The thread that acts
// for an idle application reads the device's events itself: they do not come while it waits.
bool Comm::wait_for_device_event() const {
  if ((failure_state_.acquire_flags() & kMonitorActs) != 0) return failure_state_.has(CommEvent::kDeviceFailed);
  const std::uint64_t end = monotonic_ns() + kLateCauseNs;
  while (!failure_state_.has(CommEvent::kDeviceFailed) && monotonic_ns() < end) ::usleep(kEventPollIntervalUs);
  return failure_state_.has(CommEvent::kDeviceFailed);
}

void Comm::log_held_completion() noexcept {
  publish_from([&] {
    const auto& [completion, qp, work, flushed] = failure_state_.held_completion();
    if (completion.status == IBV_WC_WR_FLUSH_ERR && wait_for_device_event()) return device_event();
    if (completion.status == IBV_WC_LOC_QP_OP_ERR) link_goes_down(qp);  // if so, the facts say it
    PathFacts path = facts(qp);
    if (work.probe && is_without_answer(completion.status, path))
      return peer_lost(failure_state_.held_completion(), path);
    path.buffer = work.buffer;
    if (work.loopback) {
      path.local.qp = completion.qp_num;
      path.remote = path.local;
    }
    const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[qp].device]->device->verbs();
    return Failure{describe_completion(completion, verbs.wc_status_str(completion.status), work, flushed),
                   diagnose(completion.status, path), path};
  });
}

PathFacts Comm::facts(std::size_t qp) const {
  PathFacts facts = endpoint_.path_facts(qp, settings_.host_name);
  facts.completed_counts = completed_counts();
  facts.peer_disconnected =
      failure_state_.has(CommEvent::kPeerClosed, CommEvent::kPeerDisconnected, CommEvent::kPeerAborted);
  if (failure_state_.has(CommEvent::kPeerFailed)) facts.peer_report = failure_state_.reason();
  if (failure_state_.channel_state() == ChannelState::kLost) {
    facts.channel_errno = static_cast<int>(failure_state_.channel_detail());
  }
  return facts;
}

Failure Comm::diagnose_setup(const Error& error) const {
  const PathFacts path = facts(endpoint_.next_qp());
  Failure failure{"", verbatim::diagnose_setup(error, &path)};
  if (error.step == SetupStep::kModifyQp) failure.path = path;
  return failure;
}

}  // namespace verbatim
