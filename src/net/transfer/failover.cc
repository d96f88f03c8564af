#include "net/transfer/failover.h"

#include <algorithm>
#include <bit>
#include <ctime>

namespace verbatim {
namespace {

// The clocks of hosts agree well enough for a picture of a job.
std::uint64_t unix_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * kNanosecondsPerSecond + static_cast<std::uint64_t>(now.tv_nsec);
}

constexpr LaneNotices::Lanes bit(std::size_t lane) {
  return LaneNotices::Lanes{1} << lane;
}
constexpr std::size_t kMaxLanes = 64;  // one bit each
static_assert(wire::kMaxDevices * wire::kMaxDevices <= kMaxLanes);

}  // namespace

LaneNotices::PerLane& LaneNotices::per_lane(std::size_t lane) {
  if (per_lane_ == nullptr) per_lane_ = std::make_unique<PerLane[]>(count_);
  return per_lane_[lane];
}

LaneNotices::Round LaneNotices::round_of(std::uint32_t lane, std::uint32_t round) {
  if (lane >= count_) return Round::kUnknownLane;
  const std::uint32_t current = per_lane(lane).round;
  return round == current ? Round::kCurrent : round < current ? Round::kEarlier : Round::kLater;
}

LaneNotices::Round LaneNotices::receive_down(const wire::LaneDown& down) {
  const MutexLock lock(mutex_);
  const Round round = round_of(down.lane, down.round);
  if (round != Round::kCurrent) return round;
  incoming_.down |= bit(down.lane);
  asked_ |= bit(down.lane);
  return round;
}

LaneNotices::Round LaneNotices::receive_report(const wire::LaneReport& report) {
  const MutexLock lock(mutex_);
  const Round round = round_of(report.lane, report.round);
  if (round != Round::kCurrent) return round;
  per_lane(report.lane).report_in = report;
  incoming_.fenced |= bit(report.lane);
  asked_ |= bit(report.lane);
  return round;
}

bool LaneNotices::supersede(std::uint32_t lane, std::uint32_t round) {
  const MutexLock lock(mutex_);
  if (round_of(lane, round) != Round::kLater) return false;
  per_lane(lane).report_in = {.lane = lane, .round = per_lane(lane).round};
  incoming_.down |= bit(lane);
  incoming_.fenced |= bit(lane);
  return true;
}

LaneNotices::Round LaneNotices::receive_joined(std::uint32_t lane, std::uint32_t round) {
  const MutexLock lock(mutex_);
  const Round of = round_of(lane, round);
  if (of == Round::kCurrent) incoming_.joined |= bit(lane);
  return of;
}

std::uint32_t LaneNotices::round(std::size_t lane) const {
  const MutexLock lock(mutex_);
  return per_lane_ != nullptr ? per_lane_[lane].round : 0;
}

void LaneNotices::begin_round(std::size_t lane, std::uint32_t round) {
  const MutexLock lock(mutex_);
  per_lane(lane).round = round;
  // The peer has declared this round down, and waits for the report.
  const bool reports = (unsent_reports_ & bit(lane)) != 0 && per_lane(lane).report_out.round == round;
  for (Lanes* lanes : {&incoming_.down, &incoming_.fenced, &incoming_.joined, &incoming_.suspected, &asked_, &reported_,
                       &declared_, &unsent_down_, &unsent_reports_}) {
    *lanes &= ~bit(lane);
  }
  if (reports) {
    reported_ |= bit(lane);
    unsent_reports_ |= bit(lane);
  }
}

void LaneNotices::receive_event(Lanes lanes) {
  const MutexLock lock(mutex_);
  incoming_.events |= lanes;
}

void LaneNotices::receive_suspicion(std::size_t lane) {
  const MutexLock lock(mutex_);
  incoming_.suspected |= bit(lane);
}

LaneNotices::Incoming LaneNotices::take() {
  const MutexLock lock(mutex_);
  return std::exchange(incoming_, {});
}

bool LaneNotices::pending() const {
  const MutexLock lock(mutex_);
  return (incoming_.down | incoming_.fenced | incoming_.joined | incoming_.suspected | incoming_.events) != 0;
}

wire::LaneReport LaneNotices::report(std::size_t lane) const {
  const MutexLock lock(mutex_);
  return per_lane_[lane].report_in;
}

void LaneNotices::send_down(std::size_t lane) {
  const MutexLock lock(mutex_);
  if ((declared_ & bit(lane)) != 0) return;
  per_lane(lane);
  declared_ |= bit(lane);
  unsent_down_ |= bit(lane);
}

void LaneNotices::send_report(wire::LaneReport report) {
  const MutexLock lock(mutex_);
  if ((reported_ & bit(report.lane)) != 0) return;
  report.round = per_lane(report.lane).round;
  per_lane(report.lane).report_out = report;
  reported_ |= bit(report.lane);
  unsent_reports_ |= bit(report.lane);
}

void LaneNotices::send_address(wire::MessageType type, const wire::LaneAddress& address) {
  const MutexLock lock(mutex_);
  per_lane(address.lane).address_type = type;
  per_lane(address.lane).address_out = address;
  unsent_addresses_ |= bit(address.lane);
}

void LaneNotices::send_empty_report(const wire::LaneDown& down) {
  const MutexLock lock(mutex_);
  per_lane(down.lane).report_out = {.lane = down.lane, .round = down.round};
  if (per_lane(down.lane).address_out.round <= down.round) unsent_addresses_ &= ~bit(down.lane);
  reported_ |= bit(down.lane);
  unsent_reports_ |= bit(down.lane);
}

LaneNotices::Lanes LaneNotices::awaited() const {
  const MutexLock lock(mutex_);
  return asked_ & ~reported_;
}

LaneNotices::Incoming LaneNotices::incoming() const {
  const MutexLock lock(mutex_);
  return incoming_;
}

bool LaneNotices::reported(std::size_t lane) const {
  const MutexLock lock(mutex_);
  return (reported_ & bit(lane)) != 0;
}

void LaneNotices::report_all_arrived(std::uint32_t members) {
  const MutexLock lock(mutex_);
  for (LaneNotices::Lanes left = asked_ & ~reported_; left != 0; left &= left - 1) {
    const auto lane = static_cast<std::uint32_t>(std::countr_zero(left));
    per_lane(lane).report_out = {
        .lane = lane, .round = per_lane(lane).round, .members = members, .next_arrival = members, .all_arrived = 1};
  }
  unsent_reports_ |= asked_ & ~reported_;
  reported_ |= asked_;
}

std::optional<wire::Notice> LaneNotices::take_notice() {
  const MutexLock lock(mutex_);
  const auto take = [](Lanes& unsent) {
    const auto lane = static_cast<std::uint32_t>(std::countr_zero(unsent));
    unsent &= unsent - 1;
    return lane;
  };
  if (unsent_down_ != 0) {
    const std::uint32_t lane = take(unsent_down_);
    return wire::Notice::lane_down({lane, per_lane(lane).round});
  }
  if (unsent_reports_ != 0) return wire::Notice::lane_fenced(per_lane(take(unsent_reports_)).report_out);
  if (unsent_addresses_ != 0) {
    const std::uint32_t lane = take(unsent_addresses_);
    return wire::Notice::lane_address(per_lane(lane).address_type, per_lane(lane).address_out);
  }
  return std::nullopt;
}

bool LaneNotices::has_notice() const {
  const MutexLock lock(mutex_);
  return (unsent_down_ | unsent_reports_ | unsent_addresses_) != 0;
}

std::unique_ptr<Failover> Failover::create(std::span<const EndpointQp> qps, bool sends, bool reconnects) {
  std::vector<Lane> lanes;
  std::vector<std::uint8_t> lane_of_qp;
  for (std::size_t qp = 0; qp < qps.size(); ++qp) {
    const auto same_lane = [&](const Lane& lane) {
      const EndpointQp& first = qps[lane.qps.front()];
      return first.device == qps[qp].device && first.remote_device == qps[qp].remote_device;
    };
    const auto lane = std::find_if(lanes.begin(), lanes.end(), same_lane);
    lane_of_qp.push_back(static_cast<std::uint8_t>(lane - lanes.begin()));
    if (lane == lanes.end()) lanes.emplace_back();
    lanes[lane_of_qp.back()].qps.push_back(static_cast<std::uint8_t>(qp));
  }
  const bool reportable =
      std::all_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.qps.size() <= wire::kMaxLaneQps; });
  if (!reportable || (lanes.size() == 1 && !reconnects)) return nullptr;
  return std::unique_ptr<Failover>(new Failover(std::move(lanes), std::move(lane_of_qp), sends, reconnects));
}

void Failover::begin_outage(std::size_t lane) {
  constexpr std::size_t kKept = 64;
  if (outages_.size() == kKept) outages_.erase(outages_.begin());
  outages_.push_back({lane, unix_ns(), 0});
}

void Failover::end_outage(std::size_t lane) {
  const auto open = std::ranges::find_if(
      outages_, [&](const LaneOutage& outage) { return outage.lane == lane && outage.end_ns == 0; });
  if (open != outages_.end()) open->end_ns = unix_ns();
}

bool Failover::confirms_suspicion(std::size_t lane, std::uint32_t completed, std::uint64_t now, std::uint64_t wait_ns) {
  Lane& suspected = lanes_[lane];
  const bool moved = std::exchange(suspected.suspected_completed, completed) != completed;
  if (moved || suspected.suspected_ns == 0) suspected.suspected_ns = now;
  return now - suspected.suspected_ns >= wait_ns;
}

void Failover::set_state(std::size_t lane, LaneState state) {
  lanes_[lane].state = state;
  if (state == LaneState::kJoining) {
    lanes_[lane].peer_fenced = lanes_[lane].used = false;
    lanes_[lane].suspected_ns = 0;
  }
  if (state == LaneState::kWorking) {
    lanes_[lane].used = true;
    not_working_.fetch_and(~bit(lane), std::memory_order_relaxed);
  } else {
    not_working_.fetch_or(bit(lane), std::memory_order_relaxed);
  }
}

}  // namespace verbatim
