// What a comm does when one of its lanes fails (failover.h). Nothing here runs while all lanes work.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "net/transfer/comm.h"
#include "verbs/errors.h"

namespace verbatim {

void Comm::enable_failover() {
  if (settings_.config.failover && (endpoint_.remote().capabilities & wire::kFailover) != 0) {
    failover_ = Failover::create(endpoint_.qps());
  }
}

std::vector<std::uint32_t> Comm::working_shares() const {
  std::vector<bool> left_out;
  for (std::size_t qp = 0; qp < endpoint_.qps().size(); ++qp) left_out.push_back(!works(qp));
  return endpoint_.qp_shares(left_out);
}

bool Comm::receive_lane_down(std::uint32_t lane) {
  if (failover_ == nullptr || !failover_->mail.receive_down(lane)) return false;
  failure_state_.set_flag(kLanes);
  return true;
}

bool Comm::receive_lane_report(const wire::LaneReport& report) {
  if (failover_ == nullptr || !failover_->mail.receive_report(report)) return false;
  failure_state_.set_flag(kLanes);
  return true;
}

void Comm::port_down(const Device& device, std::uint8_t port_num) {
  if (failover_ == nullptr) return;
  const std::span<const Port* const> ports = endpoint_.ports();
  for (std::size_t i = 0; i < ports.size(); ++i) {
    if (ports[i]->device != &device || ports[i]->port_num != port_num) continue;
    failover_->mail.receive_port(i);
    failure_state_.set_flag(kLanes);
  }
}

bool Comm::port_works(std::size_t port) const {
  const std::span<const EndpointQp> qps = endpoint_.qps();
  for (std::size_t qp = 0; qp < qps.size(); ++qp) {
    if (qps[qp].device == port && works(qp)) return true;
  }
  return false;
}

bool Comm::advance_lanes_for_idle() {
  if (failover_ == nullptr || kind_ == CommKind::kSend || failure_state_.has_failed()) return false;
  LaneMail& mail = failover_->mail;
  const std::uint64_t ports = mail.ports();
  const LaneMail::Lanes awaited = mail.awaited();
  if (ports == 0 && awaited == 0) return false;
  const std::optional<std::uint32_t> members = all_arrived();
  if (!members) return true;
  for (std::size_t lane = 0; lane < failover_->lanes(); ++lane) {
    if (takes_down(ports, lane)) mail.send_down(lane);
  }
  if (awaited == 0) return false;  // the peer's answer is looked at when it comes
  if (!rewrite_ring_without(awaited)) return true;
  mail.report_all_arrived(*members);
  return false;
}

Failure Comm::completion_failure(const ibv_wc& completion, std::size_t qp, const FailedWork& work) const {
  const PathFacts path = facts(qp);
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[qp].device]->device->verbs();
  return {describe_completion(completion, verbs.wc_status_str(completion.status), work, 0),
          diagnose(completion.status, path), path};
}

void Comm::log_lane_down(std::size_t lane, const Failure& failure) const {
  const std::vector<std::uint32_t> shares = endpoint_.qp_shares();
  std::uint64_t all = 0;
  std::uint64_t left = 0;
  for (std::size_t qp = 0; qp < shares.size(); ++qp) {
    all += shares[qp];
    if (failover_->works(qp)) left += shares[qp];
  }
  // Shares of 0 are those of a standby lane, which is used when no other is left.
  const std::string speed = left == 0 ? "a standby" : std::to_string(100 * left / all) + " % of the bandwidth";
  VERBATIM_WARN("lane %zu of %zu is down, the connection goes on over %zu with %s: %s", lane + 1, failover_->lanes(),
                failover_->working(), speed.c_str(), log_line(failure).c_str());
}

void Comm::fail_without_memory() noexcept {
  fail(ErrorKind::kSystem, "lane", [&] {
    return Failure{"there is no memory to go on without the lane that failed", {}, facts(0)};
  });
}

void Comm::fence_lane(std::size_t lane) noexcept {
  failover_->set_state(lane, LaneState::kDraining);
  failure_state_.set_flag(kLanes);
  for (const std::size_t qp : failover_->qps(lane)) {
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
  try {
    stop_lane(lane);
  } catch (...) {
    return fail_without_memory();
  }
  failover_->mail.send_down(lane);
  if (observer_ != nullptr) observer_->lanes_changed(*this);
}

// Whether the event of these ports takes the lane down: only if another one works over a port that has no event.
bool Comm::takes_down(std::uint64_t ports, std::size_t lane) const {
  const auto port_of = [&](std::size_t one) { return endpoint_.qps()[failover_->qps(one).front()].device; };
  if ((ports >> port_of(lane) & 1) == 0) return false;
  for (std::size_t other = 0; other < failover_->lanes(); ++other) {
    if (works(failover_->qps(other).front()) && (ports >> port_of(other) & 1) == 0) return true;
  }
  return false;
}

// The peer takes down the only lane that works.
void Comm::fail_last_lane(std::size_t lane) noexcept {
  fail(ErrorKind::kRemote, "lane", [&] {
    const PathFacts path = facts(failover_->qps(lane).front());
    const std::string peer = endpoint_.peer_name();
    return Failure{"the peer " + peer + " reported that the last lane of the connection is down",
                   {"every pair of ports has failed, at one end or the other",
                    "look at the links of the ports on " + settings_.host_name + " and on " + peer},
                   path};
  });
}

void Comm::process_lanes() noexcept {
  if (error() != nullptr) return;
  const LaneMail::Incoming incoming = failover_->mail.take();
  for (std::size_t lane = 0; lane < failover_->lanes(); ++lane) {
    const std::size_t qp = failover_->qps(lane).front();
    const bool port = takes_down(incoming.ports, lane);
    const bool peer = ((incoming.down | incoming.fenced) >> lane & 1) != 0;
    if ((incoming.fenced >> lane & 1) != 0) failover_->set_peer_fenced(lane);
    if (failover_->state(lane) != LaneState::kWorking || (!port && !peer)) continue;
    if (failover_->working() == 1) return fail_last_lane(lane);
    take_lane_down(qp, [&] {
      const PathFacts path = facts(qp);
      const std::string what = port ? path.local.device + " on " + path.local.host + " reported that its link is down"
                                    : "the peer " + endpoint_.peer_name() + " reported that it is down";
      const std::string next = port ? "look at the cable and the switch of " + path.local.device
                                    : "look at the log of " + endpoint_.peer_name();
      return Failure{what, {"", next}, path};
    });
  }
  for (std::size_t port = 0; port < endpoint_.ports().size() && error() == nullptr; ++port) {
    if ((incoming.ports >> port & 1) != 0 && !port_works(port)) stop_port(port);
  }
  const bool peer_closed = failure_state_.has(CommSignal::kPeerClosed);
  bool fenced = true;
  bool drained = true;
  for (std::size_t lane = 0; lane < failover_->lanes() && error() == nullptr; ++lane) {
    if (failover_->state(lane) == LaneState::kDraining && lane_drained(lane)) {
      failover_->set_state(lane, LaneState::kFenced);
      failover_->mail.send_report(lane_report(lane));
      if (observer_ != nullptr) observer_->lanes_changed(*this);
    }
    if (failover_->state(lane) == LaneState::kFenced && (failover_->peer_fenced(lane) || peer_closed)) {
      std::optional<wire::LaneReport> report;
      if (failover_->peer_fenced(lane)) report = failover_->mail.report(lane);
      if (!report || can_recover(*report)) {
        failover_->set_state(lane, LaneState::kDown);
        try {
          recover_lane(lane, report);
        } catch (...) {
          return fail_without_memory();
        }
      }
    }
    const LaneState state = failover_->state(lane);
    drained = drained && state != LaneState::kDraining;
    fenced = fenced && (state == LaneState::kWorking || state == LaneState::kDown);
  }
  if (drained) lanes_drained();
  if (!fenced || error() != nullptr || !recovered()) return;
  try {
    finish_recovery();
  } catch (...) {
    return fail_without_memory();
  }
  failure_state_.clear_flag(kLanes);
  // A notice may have come since take().
  if (failover_->mail.pending()) failure_state_.set_flag(kLanes);
}

}  // namespace verbatim
