// What a comm does when one of its lanes fails (failover.h). Nothing here runs while all lanes work.
#include <algorithm>
#include <cstring>
#include <numeric>

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

bool Comm::report_lanes_for_idle() {
  if (failover_ == nullptr || !failover_->mail.awaited()) return false;
  const std::optional<std::uint32_t> members = all_arrived();
  if (!members) return true;
  failover_->mail.report_all_arrived(*members);
  return false;
}

Failure Comm::completion_failure(const ibv_wc& completion, std::size_t qp, const FailedWork& work) const {
  const PathFacts path = facts(qp);
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[qp].device]->device->verbs();
  return {describe_completion(completion, verbs.wc_status_str(completion.status), work, 0),
          diagnose(completion.status, path), path};
}

void Comm::log_lane_down(std::size_t lane, const Failure& failure) const {
  const std::vector<std::uint32_t> shares = working_shares();
  std::uint64_t all = 0;
  std::uint64_t left = 0;
  for (std::size_t qp = 0; qp < shares.size(); ++qp) {
    all += shares[qp];
    if (failover_->lane_of(qp) != lane && failover_->works(qp)) left += shares[qp];
  }
  // Shares of 0 are those of a standby lane, which is used when no other is left.
  const std::string speed = left == 0 ? "a standby" : std::to_string(100 * left / all) + " % of the bandwidth";
  VERBATIM_WARN("lane %zu of %zu is down, the connection goes on over %zu with %s: %s", lane + 1, failover_->lanes(),
                failover_->working() - 1, speed.c_str(), log_line(failure).c_str());
}

bool Comm::fence_lane(std::size_t lane) noexcept {
  failover_->set_state(lane, LaneState::kDraining);
  for (const std::size_t qp : failover_->qps(lane)) {
    const EndpointQp& end = endpoint_.qps()[qp];
    if (const Status stopped = to_error(end.qp.get(), *endpoint_.ports()[end.device]->device); !stopped) {
      fail(ErrorKind::kSystem, stopped.error().operation, [&] {
        const PathFacts path = facts(qp);
        return Failure{
            std::string(stopped.error().operation) + " to ERR failed with " + std::strerror(stopped.error().sys_errno),
            diagnose(IBV_EVENT_DEVICE_FATAL, path), path};
      });
      return true;
    }
  }
  stop_lane(lane);
  failover_->mail.send_down(lane);
  failure_state_.set_flag(kLanes);
  if (observer_ != nullptr) observer_->lanes_changed(*this);
  return true;
}

// The peer, or an event, takes down the only lane that works.
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
    const EndpointQp& end = endpoint_.qps()[qp];
    const bool port = (incoming.ports >> end.device & 1) != 0;
    const bool peer = ((incoming.down | incoming.fenced) >> lane & 1) != 0;
    if ((incoming.fenced >> lane & 1) != 0) failover_->set_peer_fenced(lane);
    if (failover_->state(lane) != LaneState::kWorking || (!port && !peer)) continue;
    if (failover_->working() == 1) {
      if (peer) return fail_last_lane(lane);
      continue;  // the link may come back before the retries are used up
    }
    if (port) stop_port(end.device);
    take_lane_down(qp, [&] {
      const PathFacts path = facts(qp);
      const std::string what = port ? path.local.device + " on " + path.local.host + " reported that its link is down"
                                    : "the peer " + endpoint_.peer_name() + " reported that it is down";
      const std::string next = port ? "look at the cable and the switch of " + path.local.device
                                    : "look at the log of " + endpoint_.peer_name();
      return Failure{what, {"", next}, path};
    });
  }
  bool fenced = true;
  for (std::size_t lane = 0; lane < failover_->lanes() && error() == nullptr; ++lane) {
    if (failover_->state(lane) == LaneState::kDraining && lane_drained(lane)) {
      failover_->set_state(lane, LaneState::kFenced);
      failover_->mail.send_report(lane_report(lane));
      if (observer_ != nullptr) observer_->lanes_changed(*this);
    }
    if (failover_->state(lane) == LaneState::kFenced && failover_->peer_fenced(lane)) {
      const wire::LaneReport report = failover_->mail.report(lane);
      if (can_recover(report)) {
        failover_->set_state(lane, LaneState::kDown);
        try {
          recover_lane(lane, report);
        } catch (...) {
          fail(ErrorKind::kSystem, "lane", failover_->qps(lane).front(), diagnose_contradicting_calls,
               [] { return std::string("no memory to post messages again"); });
        }
      }
    }
    const LaneState state = failover_->state(lane);
    fenced = fenced && (state == LaneState::kWorking || state == LaneState::kDown);
  }
  if (!fenced || error() != nullptr || !recovered()) return;
  finish_recovery();
  failure_state_.clear_flag(kLanes);
  // A notice may have come since take().
  if (failover_->mail.pending()) failure_state_.set_flag(kLanes);
}

}  // namespace verbatim
