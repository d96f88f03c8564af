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
  if ((declared_ & bit(lane)) != 0) return;
  declared_ |= bit(lane);
  unsent_down_ |= bit(lane);
}

void LaneMail::send_report(const wire::LaneReport& report) {
  const MutexLock lock(mutex_);
  if ((reported_ & bit(report.lane)) != 0) return;
  reports_out_[report.lane] = report;
  reported_ |= bit(report.lane);
  unsent_reports_ |= bit(report.lane);
}

LaneMail::Lanes LaneMail::awaited() const {
  const MutexLock lock(mutex_);
  return asked_ & ~reported_;
}

std::uint64_t LaneMail::ports() const {
  const MutexLock lock(mutex_);
  return incoming_.ports;
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

std::optional<LaneMail::Outgoing> LaneMail::take_notice() {
  const MutexLock lock(mutex_);
  Lanes& unsent = unsent_down_ != 0 ? unsent_down_ : unsent_reports_;
  if (unsent == 0) return std::nullopt;
  const bool is_report = unsent_down_ == 0;
  const auto lane = static_cast<std::uint32_t>(std::countr_zero(unsent));
  unsent &= unsent - 1;
  return Outgoing{is_report ? wire::Notice::lane_fenced(reports_out_[lane]) : wire::Notice::lane_down(lane), is_report,
                  bit(lane)};
}

void LaneMail::unsend(const Outgoing& outgoing) {
  const MutexLock lock(mutex_);
  (outgoing.is_report ? unsent_reports_ : unsent_down_) |= outgoing.lane;
}

void LaneMail::send_again() {
  const MutexLock lock(mutex_);
  unsent_down_ = declared_;
  unsent_reports_ = reported_;
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
