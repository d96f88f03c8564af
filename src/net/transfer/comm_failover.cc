// What a comm does when one of its lanes fails (failover.h). Nothing here runs while all lanes work.
#include <algorithm>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "base/log.h"
#include "net/transfer/comm.h"
#include "net/transfer/lane_renewal.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

// The completion, or the peer's word, that says why work requests were flushed may come this much later.
constexpr std::uint64_t kCauseWaitNs = 500 * kNanosecondsPerMillisecond;
// A NIC does not wait until its writes have arrived in memory, and the completion of a QP in ERR does not say so where
// a driver makes it in software. This is longer than a write stays on a bus.
constexpr std::uint64_t kLateBytesNs = 10 * kNanosecondsPerMillisecond;
// How often the monitor looks at a lane within VERBATIM_LANE_TIMEOUT_MS.
constexpr std::uint64_t kLooks = 8;

}  // namespace

void Comm::enable_failover() {
  if (settings_.config.failover && (endpoint_.remote().capabilities & wire::kFailover) != 0) {
    const bool reconnects =
        settings_.config.reconnect_s != 0 && (endpoint_.remote().capabilities & wire::kReconnect) != 0;
    failover_ = Failover::create(endpoint_.qps(), kind_ == CommKind::kSend, reconnects);
  }
}

std::vector<std::uint32_t> Comm::working_shares() const {
  std::vector<bool> left_out;
  for (std::size_t qp = 0; qp < endpoint_.qps().size(); ++qp) left_out.push_back(!works(qp));
  return endpoint_.qp_shares(left_out);
}

// These three: without memory the connection ends.
bool Comm::receive_lane_down(const wire::LaneDown& down) noexcept try {
  if (failover_ == nullptr) return false;
  const LaneNotices::Round round = failover_->notices.receive_down(down);
  if (round == LaneNotices::Round::kUnknownLane) return false;
  if (round == LaneNotices::Round::kLater) {
    failover_->renewal.cancel(down.lane, down.round);
    failover_->notices.send_empty_report(down);
  }
  failure_state_.set_flag(kLanes);
  return true;
} catch (...) {
  return false;
}

bool Comm::receive_lane_report(const wire::LaneReport& report) noexcept try {
  if (failover_ == nullptr) return false;
  if (failover_->notices.receive_report(report) == LaneNotices::Round::kUnknownLane) return false;
  failure_state_.set_flag(kLanes);
  return true;
} catch (...) {
  return false;
}

bool Comm::receive_lane_address(wire::MessageType type, const wire::LaneAddress& address) noexcept try {
  if (failover_ == nullptr || (type == wire::MessageType::kLaneOffer && kind_ == CommKind::kSend)) return false;
  if (type == wire::MessageType::kLaneOffer || kind_ == CommKind::kSend) {
    if (!failover_->renewal.receive(address)) return false;
    // A sender that offers new QPs has nothing outstanding on those of before. After receive(): what the data path
    // has adopted until then is superseded, and it adopts no others of before.
    if (type == wire::MessageType::kLaneOffer && failover_->notices.supersede(address.lane, address.round)) {
      failure_state_.set_flag(kLanes);
    }
    return true;
  }
  if (failover_->notices.receive_joined(address.lane, address.round) == LaneNotices::Round::kUnknownLane) return false;
  failure_state_.set_flag(kLanes);
  return true;
} catch (...) {
  return false;
}

void Comm::renew_lanes() noexcept {
  for (std::size_t lane = 0; lane < failover_->lanes(); ++lane) {
    try {
      const std::span<const std::uint8_t> qps = failover_->lane(lane).qps;
      const LaneRenewal::Subject subject{endpoint_, settings_.config, qps,
                                         needs_flush_qp(endpoint_.qps()[qps.front()].device)};
      wire::LaneAddress offer;
      const LaneRenewal::Outcome outcome = failover_->renewal.renew(lane, subject, offer);
      if (outcome == LaneRenewal::Outcome::kOffer)
        failover_->notices.send_address(wire::MessageType::kLaneOffer, offer);
      if (outcome == LaneRenewal::Outcome::kReady) failure_state_.set_flag(kLanes);
    } catch (...) {
      VERBATIM_WARN("there is no memory for the QPs of a lane that is down");
      failover_->renewal.give_up(lane);
    }
  }
}

void Comm::port_down(const Device& device, std::uint8_t port_num) {
  if (failover_ == nullptr) return;
  LaneNotices::Lanes lanes = 0;
  for (std::size_t lane = 0; lane < failover_->lanes(); ++lane) {
    if (is_on(failover_->lane(lane).qps.front(), device, port_num)) lanes |= LaneNotices::Lanes{1} << lane;
  }
  receive_event(lanes);
}

void Comm::receive_event(LaneNotices::Lanes lanes) {
  if (lanes == 0) return;
  failover_->notices.receive_event(lanes);
  failure_state_.set_flag(kLanes);
}

void Comm::port_up(const Device& device, std::uint8_t port_num) {
  if (failover_ == nullptr) return;
  failover_->renewal.look_again();
  const std::span<const Port* const> ports = endpoint_.ports();
  const auto up = std::ranges::find_if(
      ports, [&](const Port* port) { return port->device == &device && port->port_num == port_num; });
  if (up != ports.end() && can_lose_lanes()) repeat_port_events(*up);
}

void Comm::repeat_port_events(const Port* up) {
  const std::span<const Port* const> ports = endpoint_.ports();
  const std::uint64_t now = monotonic_ns();
  for (std::size_t port = 0; port < ports.size(); ++port) {
    if (ports[port] == up || !ports[port]->device->history().link_since(ports[port]->port_num, now, now).down) continue;
    port_down(*ports[port]->device, ports[port]->port_num);
  }
}

std::uint64_t Comm::watch_lanes(std::uint64_t now) {
  const std::uint64_t timeout_ns = settings_.config.lane_timeout_ms * kNanosecondsPerMillisecond;
  if (!can_lose_lanes() || kind_ == CommKind::kRecv || timeout_ns == 0) return kNever;
  // The last acknowledgement came between two looks, and the data path takes a lane down at the second suspicion: with
  // both, a lane whose application polls waits no longer than the timeout, and some milliseconds.
  const std::uint64_t period_ns = timeout_ns / kLooks;
  bool other_works = false;
  for (std::size_t lane = 0; lane < failover_->lanes(); ++lane) {
    Failover::Watch& watch = failover_->lane(lane).watch;
    const LaneProgress progress = lane_progress(lane);
    const bool moved = progress.completed != std::exchange(watch.completed, progress.completed);
    const bool is_used = works(failover_->lane(lane).qps.front());
    const bool is_new = watch.waits_since_ns == 0;
    if (moved || progress.posted == progress.completed || !is_used || is_new) watch.waits_since_ns = now;
    other_works = other_works || (is_used && watch.waits_since_ns == now);
  }
  for (std::size_t lane = 0; other_works && lane < failover_->lanes(); ++lane) {
    const Failover::Watch& watch = failover_->lane(lane).watch;
    if (!works(failover_->lane(lane).qps.front()) || now - watch.waits_since_ns < timeout_ns - 2 * period_ns) continue;
    failover_->notices.receive_suspicion(lane);
    failure_state_.set_flag(kLanes);
  }
  return now + period_ns;
}

void Comm::suspect_cts() {
  for (std::size_t qp = 0; qp < endpoint_.qps().size(); ++qp) {
    if (!carries_cts(qp)) continue;
    failover_->notices.receive_suspicion(failover_->lane_of(qp));
    failure_state_.set_flag(kLanes);
  }
}

bool Comm::has_lane_down(const std::array<std::uint8_t, 16>& own, const std::array<std::uint8_t, 16>& peer) const {
  if (failover_ == nullptr) return false;
  const MutexLock lock(qps_mutex_);
  const std::uint64_t now = monotonic_ns();
  struct Lanes {
    bool down = false;
    bool working = false;
  };
  Lanes of_own;
  Lanes of_peer;
  for (std::size_t qp = 0; qp < endpoint_.qps().size(); ++qp) {
    const EndpointQp& end = endpoint_.qps()[qp];
    const Port& port = *endpoint_.ports()[end.device];
    const bool working = works(qp) && !port.device->history().link_since(port.port_num, now, now).down;
    const bool is_own = std::ranges::equal(own, endpoint_.gid(qp).gid.raw);
    const bool is_peers = peer == endpoint_.remote_gid(qp);
    if (is_own) (working ? of_own.working : of_own.down) = true;
    if (is_peers) (working ? of_peer.working : of_peer.down) = true;
  }
  return (of_own.down && !of_own.working) || (of_peer.down && !of_peer.working);
}

// As the device says: an event may come later. rxe refuses work some milliseconds before it says so.
bool Comm::link_goes_down(std::size_t qp) const {
  return verbatim::link_goes_down(*endpoint_.ports()[endpoint_.qps()[qp].device]);
}

std::uint64_t Comm::waited_ns(std::uint64_t now) {
  std::uint64_t& last = failover_->last_look_ns;
  const std::uint64_t passed = last == 0 ? 0 : now - last;
  last = now;
  const bool is_open = failure_state_.channel_state() == ChannelState::kOpen;
  const LaneWait wait = lane_wait();
  if (wait == LaneWait::kNone) last = 0;
  // Over a channel that is open the ends agree.
  const bool is_over = wait == LaneWait::kNone || (wait == LaneWait::kForAgreement && is_open);
  if (std::exchange(failover_->waits_as, wait) != wait || is_over) {
    failover_->waited_ns = 0;
  } else if (wait == LaneWait::kForAgreement || !failover_->renewal.waits_for_others(is_open)) {
    failover_->waited_ns += passed;
  }
  return failover_->waited_ns;
}

bool Comm::port_is_used(std::size_t port) const {
  const std::span<const EndpointQp> qps = endpoint_.qps();
  for (std::size_t qp = 0; qp < qps.size(); ++qp) {
    const bool joins = failover_->lane(failover_->lane_of(qp)).state == LaneState::kJoining;
    if (qps[qp].device == port && (joins || works(qp))) return true;
  }
  return false;
}

bool Comm::advance_lanes_for_idle() noexcept try {
  if (failover_ == nullptr || kind_ == CommKind::kSend || failure_state_.has_failed()) return false;
  LaneNotices& notices = failover_->notices;
  const LaneNotices::Incoming incoming = notices.incoming();
  const LaneNotices::Lanes events = incoming.events | incoming.suspected;
  const LaneNotices::Lanes awaited = notices.awaited();
  if (events == 0 && awaited == 0) return false;
  const std::optional<std::uint32_t> members = all_arrived();
  if (!members) return true;
  for (std::size_t lane = 0; lane < failover_->lanes(); ++lane) {
    if (takes_down(incoming, events, lane)) notices.send_down(lane);
  }
  if (awaited == 0) return false;  // the peer's answer is looked at when it comes
  // With one lane, the entries are written again when it is back.
  if (failover_->lanes() > 1 && !rewrite_ring_without(awaited)) return true;
  notices.report_all_arrived(*members);
  return false;
} catch (...) {  // no memory: it is tried again
  return true;
}

Failure Comm::completion_failure(const ibv_wc& completion, std::size_t qp, const FailedWork& work) const {
  const PathFacts path = facts(qp);
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[qp].device]->device->verbs();
  return {describe_completion(completion, verbs.wc_status_str(completion.status), work, 0),
          diagnose(completion.status, path), path};
}

// Of the lanes that work.
std::string Comm::bandwidth_left() const {
  const std::vector<std::uint32_t> shares = endpoint_.qp_shares();
  std::uint64_t all = 0;
  std::uint64_t left = 0;
  for (std::size_t qp = 0; qp < shares.size(); ++qp) {
    all += shares[qp];
    if (failover_->works(qp)) left += shares[qp];
  }
  // Shares of 0 are those of a standby lane, which is used when no other is left.
  return left == 0 ? "a standby" : std::to_string(100 * left / all) + " % of the bandwidth";
}

void Comm::log_lane_down(std::size_t lane, bool worked, const Failure& failure) const {
  const std::size_t lanes = failover_->lanes();
  if (!worked) {
    return VERBATIM_INFO("lane %zu of %zu does not come back yet: %s", lane + 1, lanes, log_line(failure).c_str());
  }
  if (failover_->working() == 0) {
    return VERBATIM_WARN(
        "lane %zu of %zu is down, the connection waits for up to %u s until a lane is back "
        "(VERBATIM_RECONNECT_S): %s",
        lane + 1, lanes, settings_.config.reconnect_s, log_line(failure).c_str());
  }
  VERBATIM_WARN("lane %zu of %zu is down, the connection goes on over %zu with %s: %s", lane + 1, lanes,
                failover_->working(), bandwidth_left().c_str(), log_line(failure).c_str());
}

void Comm::log_lane_up(std::size_t lane) const {
  const std::uint64_t outage_ns = monotonic_ns() - failover_->lane(lane).down_ns;
  VERBATIM_WARN("lane %zu of %zu is back after %s, the connection uses %zu with %s. Path: %s", lane + 1,
                failover_->lanes(), to_duration(outage_ns).c_str(), failover_->working(), bandwidth_left().c_str(),
                describe_path(failover_->lane(lane).qps.front()).c_str());
}

// Whether the comm can go on although its last lane fails. A connection that has never worked is not made for this
// network; one whose peer has ended, or answers nothing, has nobody to wait for.
bool Comm::can_wait_for_lane(bool is_known) const {
  const bool ended = failure_state_.has(CommEvent::kPeerClosed, CommEvent::kPeerDisconnected, CommEvent::kPeerFailed,
                                        CommEvent::kPeerAborted, CommEvent::kFailedByMonitor);
  const bool device_failed =
      failure_state_.has(CommEvent::kDeviceFailed) && !is_qp_event(failure_state_.device_event());
  return failover_->reconnects() && !ended && !device_failed && failure_state_.channel_state() == ChannelState::kOpen &&
         (is_known || completed_counts().peer_responded);
}

void Comm::fail_without_memory() noexcept {
  fail(ErrorKind::kSystem, "lane", [&] {
    return Failure{"there is no memory to go on without the lane that failed", {}, facts(0)};
  });
}

// A work request of the last lane was flushed: a consequence. Until its cause is known the comm waits, because with
// most causes it can wait for a lane. False: no memory.
bool Comm::await_cause(const ibv_wc& completion, std::size_t qp, const FailedWork& work) noexcept {
  std::unique_ptr<Failover::Flushed>& flushed = failover_->flushed;
  if (flushed != nullptr) {
    ++flushed->completion.flushed;
    return true;
  }
  flushed.reset(new (std::nothrow) Failover::Flushed{{completion, qp, work, 0}, monotonic_ns()});
  if (flushed != nullptr) failure_state_.set_flag(kLanes);
  return flushed != nullptr;
}

// False: the comm has failed, or nothing was flushed.
bool Comm::awaits_cause() noexcept {
  const Failover::Flushed* const flushed = failover_->flushed.get();
  if (flushed == nullptr) return false;
  if (monotonic_ns() - flushed->since_ns < kCauseWaitNs &&
      can_wait_for_lane(endpoint_.link_was_down(flushed->completion.qp)))
    return true;
  const FailureState::HeldCompletion& first = flushed->completion;
  fail_completion(first.completion, first.qp, first.work);
  log_held_completion();
  return false;
}

void Comm::fence_lane(std::size_t lane) noexcept {
  failover_->flushed.reset();
  failover_->set_state(lane, LaneState::kDraining);
  if (failover_->lane(lane).used) failover_->lane(lane).down_ns = monotonic_ns();
  failover_->waits = failover_->working() == 0;
  if (failover_->lane(lane).used) recovering_ = true;
  failure_state_.set_flag(kLanes);
  for (const std::size_t qp : failover_->lane(lane).qps) {
    const EndpointQp& end = endpoint_.qps()[qp];
    const Status stopped = to_error(end.qp.get(), *endpoint_.ports()[end.device]->device);
    if (stopped) continue;
    return fail(ErrorKind::kSystem, stopped.error().operation, [&] {
      const PathFacts path = facts(qp);
      return Failure{
          std::string(stopped.error().operation) + " to ERR failed with " + std::strerror(stopped.error().sys_errno),
          diagnose(IBV_EVENT_DEVICE_FATAL, path), path};
    });
  }
  failover_->fenced_ns = monotonic_ns();
  try {
    if (failover_->lane(lane).used) failover_->begin_outage(lane);
    stop_lane(lane);
    failover_->notices.send_down(lane);
  } catch (...) {
    return fail_without_memory();
  }
  if (observer_ != nullptr) observer_->comm_changed(*this);
}

// Whether the events of these lanes take the lane down: only if another one works that has no event, and that the peer
// has not taken down.
bool Comm::takes_down(const LaneNotices::Incoming& incoming, LaneNotices::Lanes events, std::size_t lane) const {
  if ((events >> lane & 1) == 0) return false;
  const LaneNotices::Lanes leaving = events | incoming.down | incoming.fenced;
  for (std::size_t other = 0; other < failover_->lanes(); ++other) {
    if (works(failover_->lane(other).qps.front()) && (leaving >> other & 1) == 0) return true;
  }
  return false;
}

// The peer takes down the only lane that works.
void Comm::fail_last_lane(std::size_t lane) noexcept {
  fail(ErrorKind::kRemote, "lane", [&] {
    const PathFacts path = facts(failover_->lane(lane).qps.front());
    const std::string peer = endpoint_.peer_name();
    return Failure{"the peer " + peer + " reported that the last lane of the connection is down",
                   {"every pair of ports has failed, at one end or the other",
                    "look at the links of the ports on " + settings_.host_name + " and on " + peer},
                   path};
  });
}

void Comm::process_lanes(bool all_polled) noexcept try {
  if (error() != nullptr) return;
  receive_lane_notices();
  const bool may_be_late = kind_ == CommKind::kRecv && monotonic_ns() - failover_->fenced_ns < kLateBytesNs;
  if (!may_be_late) late_bytes_have_come();
  bool recovering = false;  // until both ends have fenced a lane
  for (std::size_t lane = 0; lane < failover_->lanes() && error() == nullptr; ++lane) {
    advance_lane(lane, may_be_late);
    // QPs that were in ERR for so long have no completions left when all have been polled.
    if (all_polled && failover_->lane(lane).state == LaneState::kDown) adopt_new_qps(lane);
    const LaneState state = failover_->lane(lane).state;
    const bool fences = state == LaneState::kDraining || state == LaneState::kFenced;
    recovering = recovering || (fences && failover_->lane(lane).used);
  }
  failover_->fences = recovering;
  if (awaits_cause()) return;
  if (recovering || failover_->working() == 0 || error() != nullptr) return;
  if (recovering_) {
    if (!recovered()) return;
    finish_recovery();
    recovering_ = false;
  }
  failure_state_.clear_flag(kLanes);
  // A notice may have come since take(), or new QPs.
  bool pending = may_be_late || failover_->notices.pending();
  for (std::size_t lane = 0; lane < failover_->lanes(); ++lane) {
    pending = pending || (failover_->lane(lane).state == LaneState::kDown && failover_->renewal.ready(lane));
  }
  if (pending) failure_state_.set_flag(kLanes);
} catch (...) {
  fail_without_memory();
}

void Comm::receive_lane_notices() {
  const LaneNotices::Incoming incoming = failover_->notices.take();
  const std::uint64_t half_look_ns = settings_.config.lane_timeout_ms * kNanosecondsPerMillisecond / kLooks / 2;
  for (std::size_t lane = 0; lane < failover_->lanes() && error() == nullptr; ++lane) {
    const std::size_t qp = failover_->lane(lane).qps.front();
    const LaneState state = failover_->lane(lane).state;
    const bool port = takes_down(incoming, incoming.events, lane);
    const bool peer = ((incoming.down | incoming.fenced) >> lane & 1) != 0;
    const bool suspected =
        (incoming.suspected >> lane & 1) != 0 && failover_->working() > 1 &&
        (kind_ == CommKind::kRecv ||
         failover_->confirms_suspicion(lane, lane_progress(lane).completed, monotonic_ns(), half_look_ns));
    if ((incoming.fenced >> lane & 1) != 0) failover_->lane(lane).peer_fenced = true;
    if (state == LaneState::kJoining && !peer && (incoming.joined >> lane & 1) != 0) lane_joined(lane);
    if ((state != LaneState::kWorking && state != LaneState::kJoining) || (!port && !peer && !suspected)) continue;
    if (state == LaneState::kWorking && failover_->working() == 1 && !can_wait_for_lane(peer))
      return fail_last_lane(lane);
    take_lane_down(qp, [&] {
      const PathFacts path = facts(qp);
      if (!port && !peer) {
        const std::string timeout = std::to_string(settings_.config.lane_timeout_ms) + " ms (VERBATIM_LANE_TIMEOUT_MS)";
        return Failure{kind_ == CommKind::kRecv
                           ? "a CTS entry has not arrived at the peer for " + timeout
                           : "nothing was acknowledged for " + timeout + ", while another lane has acknowledgements",
                       {"packets are lost on this path, or it is far slower than the others",
                        "look at the links and the switches between the two ports"},
                       path};
      }
      const std::string event =
          path.gid_removed ? " reported that its GID has changed" : " reported that its link is down";
      const std::string what = port ? path.local.device + " on " + path.local.host + event
                                    : "the peer " + endpoint_.peer_name() + " reported that it is down";
      const std::string own = path.gid_removed ? "look at the addresses of " : "look at the cable and the switch of ";
      const std::string next = port ? own + path.local.device : "look at the log of " + endpoint_.peer_name();
      return Failure{what, {"", next}, path};
    });
  }
  for (std::size_t lane = 0; lane < failover_->lanes() && error() == nullptr; ++lane) {
    const std::size_t port = endpoint_.qps()[failover_->lane(lane).qps.front()].device;
    if ((incoming.events >> lane & 1) != 0 && !port_is_used(port)) stop_port(port);
  }
}

void Comm::advance_lane(std::size_t lane, bool may_be_late) {
  if (failover_->lane(lane).state == LaneState::kDraining && lane_drained(lane) && !may_be_late) {
    failover_->set_state(lane, LaneState::kFenced);
    if (!failover_->notices.reported(lane)) failover_->notices.send_report(lane_report(lane));
    if (observer_ != nullptr) observer_->comm_changed(*this);
  }
  const bool peer_closed = failure_state_.has(CommEvent::kPeerClosed);
  if (failover_->lane(lane).state == LaneState::kFenced && (failover_->lane(lane).peer_fenced || peer_closed)) {
    std::optional<wire::LaneReport> report;
    if (failover_->lane(lane).peer_fenced) report = failover_->notices.report(lane);
    const bool unused = !failover_->lane(lane).used;
    failover_->set_state(lane, LaneState::kDown);
    recover_lane(lane, report);
    if (!report) return;
    failover_->renewal.lane_down(lane, failover_->notices.round(lane), unused);
    if (observer_ != nullptr) observer_->comm_changed(*this);
  }
  if (failover_->lane(lane).state == LaneState::kJoining && kind_ == CommKind::kSend &&
      failover_->lane(lane).pings == 0) {
    lane_joined(lane);
    wire::LaneAddress address;
    address.lane = static_cast<std::uint32_t>(lane);
    address.round = failover_->notices.round(lane);
    failover_->notices.send_address(wire::MessageType::kLaneAnswer, address);
    if (observer_ != nullptr) observer_->comm_changed(*this);
  }
}

// The data path alone knows when a QP of its endpoint is not in use.
void Comm::adopt_new_qps(std::size_t lane) {
  LaneRenewal& renewal = failover_->renewal;
  const std::optional<std::uint32_t> round = renewal.ready(lane);
  if (!round) return;
  failover_->notices.begin_round(lane, *round);
  std::optional<LaneQps> made = renewal.adopt(lane, *round);
  if (!made) return;  // the peer has declared it down, or has made another offer
  const wire::LaneAddress local = made->local;
  const std::size_t port = made->qps.front().device;
  bool flushes = true;
  {
    const MutexLock lock(qps_mutex_);
    endpoint_.exchange_qps(failover_->lane(lane).qps, made->qps, made->remote);
    flushes = restore_flush_qp(port, made->flush_qp);
  }
  renewal.retire(std::move(*made));
  failover_->set_state(lane, LaneState::kJoining);
  adopt_lane(lane);
  if (kind_ == CommKind::kRecv) failover_->notices.send_address(wire::MessageType::kLaneAnswer, local);
  if (!flushes) fence_lane(lane);  // a flush has been prepared since
  if (observer_ != nullptr) observer_->comm_changed(*this);
}

void Comm::lane_joined(std::size_t lane) {
  if (failure_state_.clear_qp_event()) device_event_ns_ = 0;
  failover_->set_state(lane, LaneState::kWorking);
  failover_->waits = false;
  failover_->end_outage(lane);
  use_lane(lane);
  repeat_port_events(nullptr);
  log_lane_up(lane);
  if (observer_ != nullptr) observer_->comm_changed(*this);
}

}  // namespace verbatim
