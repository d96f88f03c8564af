#include "net/transfer/failover.h"

#include <algorithm>
#include <bit>

namespace verbatim {
namespace {

constexpr LaneMail::Lanes bit(std::size_t lane) {
  return LaneMail::Lanes{1} << lane;
}
constexpr std::size_t kMaxLanes = 64;  // one bit each
static_assert(wire::kMaxDevices * wire::kMaxDevices <= kMaxLanes);

}  // namespace

bool LaneMail::receive_down(std::uint32_t lane) {
  const MutexLock lock(mutex_);
  if (lane >= reports_in_.size()) return false;
  incoming_.down |= bit(lane);
  asked_ |= bit(lane);
  return true;
}

bool LaneMail::receive_report(const wire::LaneReport& report) {
  const MutexLock lock(mutex_);
  if (report.lane >= reports_in_.size()) return false;
  reports_in_[report.lane] = report;
  incoming_.fenced |= bit(report.lane);
  asked_ |= bit(report.lane);
  return true;
}

void LaneMail::receive_port(std::size_t port) {
  const MutexLock lock(mutex_);
  incoming_.ports |= bit(port);
}

LaneMail::Incoming LaneMail::take() {
  const MutexLock lock(mutex_);
  return std::exchange(incoming_, {});
}

bool LaneMail::pending() const {
  const MutexLock lock(mutex_);
  return (incoming_.down | incoming_.fenced | incoming_.ports) != 0;
}

wire::LaneReport LaneMail::report(std::size_t lane) const {
  const MutexLock lock(mutex_);
  return reports_in_[lane];
}

void LaneMail::send_down(std::size_t lane) {
  const MutexLock lock(mutex_);
  unsent_down_ |= bit(lane);
}

void LaneMail::send_report(const wire::LaneReport& report) {
  const MutexLock lock(mutex_);
  if ((reported_ & bit(report.lane)) != 0) return;
  reports_out_[report.lane] = report;
  reported_ |= bit(report.lane);
  unsent_reports_ |= bit(report.lane);
}

bool LaneMail::awaited() const {
  const MutexLock lock(mutex_);
  return (asked_ & ~reported_) != 0;
}

void LaneMail::report_all_arrived(std::uint32_t members) {
  const MutexLock lock(mutex_);
  for (LaneMail::Lanes left = asked_ & ~reported_; left != 0; left &= left - 1) {
    const auto lane = static_cast<std::uint32_t>(std::countr_zero(left));
    reports_out_[lane] = {.lane = lane, .members = members, .all_arrived = 1};
  }
  unsent_reports_ |= asked_ & ~reported_;
  reported_ |= asked_;
}

std::optional<wire::Notice> LaneMail::next_notice() const {
  const MutexLock lock(mutex_);
  if (unsent_down_ != 0) return wire::Notice::lane_down(static_cast<std::uint32_t>(std::countr_zero(unsent_down_)));
  if (unsent_reports_ == 0) return std::nullopt;
  return wire::Notice::lane_fenced(reports_out_[static_cast<std::size_t>(std::countr_zero(unsent_reports_))]);
}

void LaneMail::sent() {
  const MutexLock lock(mutex_);
  Lanes& unsent = unsent_down_ != 0 ? unsent_down_ : unsent_reports_;
  unsent &= unsent - 1;
}

std::unique_ptr<Failover> Failover::create(std::span<const EndpointQp> qps) {
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
  const bool reportable = std::all_of(lanes.begin(), lanes.end(),
                                      [](const Lane& lane) { return lane.qps.size() <= wire::LaneReport::kMaxQps; });
  if (lanes.size() < 2 || !reportable) return nullptr;
  return std::unique_ptr<Failover>(new Failover(std::move(lanes), std::move(lane_of_qp)));
}

void Failover::set_state(std::size_t lane, LaneState state) {
  lanes_[lane].state = state;
  if (state != LaneState::kWorking) not_working_.fetch_or(bit(lane), std::memory_order_relaxed);
}

}  // namespace verbatim
