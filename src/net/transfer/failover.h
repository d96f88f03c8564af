// What happens when a lane of a connection with several fails: both ends move its QPs to ERR and tell each other what
// has arrived there; then the sender posts what has not on the other lanes.
//
//   kWorking   --failed completion, port event, the peer's kLaneDown--> kDraining   QPs to ERR, kLaneDown to the peer
//   kDraining  --its sends, or its receives, have completed--> kFenced              kLaneFenced to the peer
//   kFenced    --the peer's kLaneFenced--> kDown                                    what is missing is posted again
//
// RC delivers in order. So the receiver reports only how many immediates have arrived on each QP: the sender knows in
// which order it posted them. A LaneLog keeps that order for one QP.
//
// Between the first step and the end of the last one the slow path flag kLanes is set: the comm posts no new message,
// and each call of the data path advances the lanes (Comm::process_lanes). LaneMail is how the monitor takes part.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "net/transfer/endpoint.h"
#include "wire/notice.h"

namespace verbatim {

// Notices between the data path of a comm and the monitor, which sends and receives them. Any thread.
class LaneMail {
 public:
  explicit LaneMail(std::size_t lanes) : reports_in_(lanes), reports_out_(lanes) {}

  // By lane, one bit each.
  using Lanes = std::uint64_t;
  struct Incoming {
    Lanes down = 0;           // the peer's kLaneDown
    Lanes fenced = 0;         // the peer's kLaneFenced: report()
    std::uint64_t ports = 0;  // of this end, by index: an event says that they are down
  };

  // Returns false when there is no such lane.
  bool receive_down(std::uint32_t lane) VERBATIM_EXCLUDES(mutex_);
  bool receive_report(const wire::LaneReport& report) VERBATIM_EXCLUDES(mutex_);
  void receive_port(std::size_t port) VERBATIM_EXCLUDES(mutex_);
  Incoming take() VERBATIM_EXCLUDES(mutex_);
  // Whether take() would return anything.
  bool pending() const VERBATIM_EXCLUDES(mutex_);
  wire::LaneReport report(std::size_t lane) const VERBATIM_EXCLUDES(mutex_);

  // Only once a lane.
  void send_down(std::size_t lane) VERBATIM_EXCLUDES(mutex_);
  // Only the first report of a lane is sent.
  void send_report(const wire::LaneReport& report) VERBATIM_EXCLUDES(mutex_);
  // Of which lanes the peer waits for a report.
  Lanes awaited() const VERBATIM_EXCLUDES(mutex_);
  // Incoming::ports, which the data path has not taken yet.
  std::uint64_t ports() const VERBATIM_EXCLUDES(mutex_);
  // Reports each of those lanes as one on which everything has arrived; `members` receives have been posted.
  void report_all_arrived(std::uint32_t members) VERBATIM_EXCLUDES(mutex_);
  // A notice to send, nullopt if there is none. Afterwards it counts as sent; unsend() takes that back.
  struct Outgoing {
    wire::Notice notice;
    bool is_report;
    Lanes lane;
  };
  std::optional<Outgoing> take_notice() VERBATIM_EXCLUDES(mutex_);
  void unsend(const Outgoing& outgoing) VERBATIM_EXCLUDES(mutex_);
  // All notices are sent again: those on a side channel that was lost may not have arrived. The peer ignores repeats.
  void send_again() VERBATIM_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  Incoming incoming_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<wire::LaneReport> reports_in_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<wire::LaneReport> reports_out_ VERBATIM_GUARDED_BY(mutex_);
  Lanes asked_ VERBATIM_GUARDED_BY(mutex_) = 0;     // by the peer
  Lanes reported_ VERBATIM_GUARDED_BY(mutex_) = 0;  // in reports_out_
  Lanes declared_ VERBATIM_GUARDED_BY(mutex_) = 0;  // down, by this end
  Lanes unsent_down_ VERBATIM_GUARDED_BY(mutex_) = 0;
  Lanes unsent_reports_ VERBATIM_GUARDED_BY(mutex_) = 0;
};

enum class LaneState : std::uint8_t { kWorking, kDraining, kFenced, kDown };

// The lanes of a comm. The thread of its data path, except what is marked.
class Failover {
 public:
  // nullptr where failover is impossible: one lane, or too many QPs for a notice.
  static std::unique_ptr<Failover> create(std::span<const EndpointQp> qps);

  std::size_t lanes() const { return lanes_.size(); }
  // Lanes have the same numbers at both ends: in the order of their first QPs.
  std::size_t lane_of(std::size_t qp) const { return lane_of_qp_[qp]; }
  std::span<const std::uint8_t> qps(std::size_t lane) const { return lanes_[lane].qps; }
  LaneState state(std::size_t lane) const { return lanes_[lane].state; }
  // Any thread.
  bool works(std::size_t qp) const {
    return (not_working_.load(std::memory_order_relaxed) >> lane_of_qp_[qp] & 1) == 0;
  }
  std::size_t not_working() const {
    return static_cast<std::size_t>(std::popcount(not_working_.load(std::memory_order_relaxed)));
  }
  std::size_t working() const { return lanes() - not_working(); }
  void set_state(std::size_t lane, LaneState state);
  bool peer_fenced(std::size_t lane) const { return lanes_[lane].peer_fenced; }
  void set_peer_fenced(std::size_t lane) { lanes_[lane].peer_fenced = true; }

  LaneMail mail;  // any thread

 private:
  struct Lane {
    LaneState state = LaneState::kWorking;
    bool peer_fenced = false;
    std::vector<std::uint8_t> qps;
  };

  explicit Failover(std::vector<Lane> lanes, std::vector<std::uint8_t> lane_of_qp)
      : mail(lanes.size()), lanes_(std::move(lanes)), lane_of_qp_(std::move(lane_of_qp)) {}

  std::vector<Lane> lanes_;
  std::vector<std::uint8_t> lane_of_qp_;
  std::atomic<LaneMail::Lanes> not_working_{0};
};

// A part of a group that was posted on a QP: its ring index, number, and which of its 65,536 parts it carries.
struct SentPart {
  std::uint16_t index = 0;
  std::uint8_t part = 0;
  std::uint8_t last_part = 0;  // number of the group's last part
  std::uint16_t begin = 0;
  std::uint16_t last = 0;  // end - 1
};

// The parts of one QP that are not acknowledged, in their order. Parts of groups with optional completion have no
// immediate.
class LaneLog {
 public:
  static constexpr std::uint32_t kSize = 256;  // as many groups can be outstanding

  bool full() const { return posted_ - completed_ == kSize; }
  void add(const SentPart& part, bool immediate) {
    parts_[posted_ % kSize] = part;
    immediate_[posted_ % kSize] = immediate;
    ++posted_;
    if (immediate) ++immediates_;
  }
  // The oldest part is acknowledged: RC acknowledges in order.
  void complete() { ++completed_; }

  // Empties the log. Calls arrived(part) for each part that the peer has, and missing(part, immediate) for each other
  // one. `count`: immediates that have arrived on this QP, modulo 2^32; nullopt: all.
  template <typename Arrived, typename Missing>
  void divide(std::optional<std::uint32_t> count, Arrived arrived, Missing missing) {
    std::uint32_t open_immediates = 0;
    for (std::uint32_t i = completed_; i != posted_; ++i) open_immediates += immediate_[i % kSize] ? 1U : 0U;
    // What was posted before an immediate that has arrived has arrived too.
    std::uint32_t left = count ? *count - (immediates_ - open_immediates) : open_immediates;
    if (left > open_immediates) left = 0;  // older than the last acknowledgement
    for (; completed_ != posted_; ++completed_) {
      const SentPart& part = parts_[completed_ % kSize];
      const bool immediate = immediate_[completed_ % kSize];
      if (left != 0) {
        left -= immediate ? 1U : 0U;
        arrived(part);
      } else {
        missing(part, immediate);
      }
    }
  }

 private:
  std::array<SentPart, kSize> parts_ = {};
  std::array<bool, kSize> immediate_ = {};
  std::uint32_t posted_ = 0;
  std::uint32_t completed_ = 0;
  std::uint32_t immediates_ = 0;  // posted
};

}  // namespace verbatim
