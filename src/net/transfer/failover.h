// What happens when a lane of a connection fails: both ends move its QPs to ERR and tell each other what
// has arrived there; then the sender posts what has not on the other lanes.
//
//   kWorking   --failed completion, port event, the peer's kLaneDown--> kDraining   QPs to ERR, kLaneDown to the peer
//   kDraining  --its sends, or its receives, have completed--> kFenced              kLaneFenced to the peer
//              A receiver waits for what its NIC may still hold back
//   kFenced    --the peer's kLaneFenced--> kDown                                    what is missing is posted again
//   kDown      --new QPs (lane_renewal.h)--> kJoining                               messages may arrive
//   kJoining   --WRITEs of 0 bytes have completed, the sender's word--> kWorking    used again
//   kJoining   --as kWorking--> kDraining
//
// Each time a lane comes back, a new round of it begins. When no lane works, the comm waits until one does
// (VERBATIM_RECONNECT_S).
//
// With several lanes and immediates, parts of messages are posted again. RC delivers in order, so the receiver reports
// only how many immediates have arrived on each QP: the sender knows in which order it posted them. A LaneLog keeps
// that order for one QP.
//
// With one lane, or with arrival words, whole messages are posted again (Comm::replays_messages). An arrival word does
// not say which parts have arrived. So the sender is fenced when nothing is outstanding on any lane, and only then does
// the receiver report which messages are complete. It counts the parts of the others anew, from zero.
//
// Between the first step and the end of the last one the slow path flag kLanes is set: the comm posts no new message,
// and each call of the data path advances the lanes (Comm::process_lanes). LaneNotices is how the monitor takes part.
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
#include "net/transfer/connection_stats.h"
#include "net/transfer/endpoint.h"
#include "net/transfer/failure_state.h"
#include "net/transfer/lane_renewal.h"
#include "net/transfer/single_writer.h"
#include "wire/notice.h"

namespace verbatim {

// Notices between the data path of a comm and the monitor, which sends and receives them. Any thread.
class LaneNotices {
 public:
  explicit LaneNotices(std::size_t lanes) : count_(lanes) {}

  // By lane, one bit each.
  using Lanes = std::uint64_t;
  struct Incoming {
    Lanes down = 0;       // the peer's kLaneDown
    Lanes fenced = 0;     // the peer's kLaneFenced: report()
    Lanes joined = 0;     // the sender's kLaneAnswer
    Lanes suspected = 0;  // nothing is acknowledged: Comm::watch_lanes; or CTS entries do not arrive
    Lanes events = 0;     // this end's port is down, or its address has changed
  };

  // What a notice of the peer belongs to.
  enum class Round : std::uint8_t { kUnknownLane, kEarlier, kCurrent, kLater };
  // Only notices of the current round have an effect.
  Round receive_down(const wire::LaneDown& down) VERBATIM_EXCLUDES(mutex_);
  Round receive_report(const wire::LaneReport& report) VERBATIM_EXCLUDES(mutex_);
  // The peer has nothing outstanding in rounds before this one. Returns whether the current one is such a round.
  bool supersede(std::uint32_t lane, std::uint32_t round) VERBATIM_EXCLUDES(mutex_);
  Round receive_joined(std::uint32_t lane, std::uint32_t round) VERBATIM_EXCLUDES(mutex_);
  void receive_event(Lanes lanes) VERBATIM_EXCLUDES(mutex_);
  void receive_suspicion(std::size_t lane) VERBATIM_EXCLUDES(mutex_);
  Incoming take() VERBATIM_EXCLUDES(mutex_);
  // Whether take() would return anything.
  bool pending() const VERBATIM_EXCLUDES(mutex_);
  wire::LaneReport report(std::size_t lane) const VERBATIM_EXCLUDES(mutex_);

  std::uint32_t round(std::size_t lane) const VERBATIM_EXCLUDES(mutex_);
  // The lane has new QPs: what was sent and received about the old ones is forgotten.
  void begin_round(std::size_t lane, std::uint32_t round) VERBATIM_EXCLUDES(mutex_);

  // Only once in a round.
  void send_down(std::size_t lane) VERBATIM_EXCLUDES(mutex_);
  // Only the first report of a lane in a round is sent. send_report() sets its round.
  void send_report(wire::LaneReport report) VERBATIM_EXCLUDES(mutex_);
  // An offer or an answer.
  void send_address(wire::MessageType type, const wire::LaneAddress& address) VERBATIM_EXCLUDES(mutex_);
  // Of a sender, about a round that it has not begun: nothing is outstanding.
  void send_empty_report(const wire::LaneDown& down) VERBATIM_EXCLUDES(mutex_);
  // Of which lanes the peer waits for a report.
  Lanes awaited() const VERBATIM_EXCLUDES(mutex_);
  // What the data path has not taken yet.
  Incoming incoming() const VERBATIM_EXCLUDES(mutex_);
  // Whether this end has reported the lane in this round.
  bool reported(std::size_t lane) const VERBATIM_EXCLUDES(mutex_);
  // Reports each of those lanes as one on which everything has arrived; `members` receives have been posted.
  void report_all_arrived(std::uint32_t members) VERBATIM_EXCLUDES(mutex_);
  // A notice to send, nullopt if there is none. Afterwards it counts as sent.
  std::optional<wire::Notice> take_notice() VERBATIM_EXCLUDES(mutex_);
  bool has_notice() const VERBATIM_EXCLUDES(mutex_);

 private:
  struct PerLane {
    wire::LaneReport report_in;
    wire::LaneReport report_out;
    wire::LaneAddress address_out;
    wire::MessageType address_type;
    std::uint32_t round = 0;
  };

  Round round_of(std::uint32_t lane, std::uint32_t round) VERBATIM_REQUIRES(mutex_);
  PerLane& per_lane(std::size_t lane) VERBATIM_REQUIRES(mutex_);

  const std::size_t count_;
  mutable Mutex mutex_;
  Incoming incoming_ VERBATIM_GUARDED_BY(mutex_);
  // Allocated with the first notice: most connections never have one.
  std::unique_ptr<PerLane[]> per_lane_ VERBATIM_GUARDED_BY(mutex_);
  Lanes asked_ VERBATIM_GUARDED_BY(mutex_) = 0;     // by the peer
  Lanes reported_ VERBATIM_GUARDED_BY(mutex_) = 0;  // in reports_out_
  Lanes declared_ VERBATIM_GUARDED_BY(mutex_) = 0;  // down, by this end
  Lanes unsent_down_ VERBATIM_GUARDED_BY(mutex_) = 0;
  Lanes unsent_reports_ VERBATIM_GUARDED_BY(mutex_) = 0;
  Lanes unsent_addresses_ VERBATIM_GUARDED_BY(mutex_) = 0;
};

enum class LaneState : std::uint8_t { kWorking, kDraining, kFenced, kDown, kJoining };
// Why no message moves. kForLane: no lane works. kForAgreement: one does, but the ends have not both fenced another.
enum class LaneWait : std::uint8_t { kNone, kForLane, kForAgreement };

// The lanes of a comm. The thread of its data path, except what is marked.
class Failover {
 public:
  // The monitor's: what it has seen of a lane's acknowledgements.
  struct Watch {
    std::uint32_t completed = 0;
    std::uint64_t waits_since_ns = 0;  // for an acknowledgement; the time of the last look if one came or none is due
  };
  struct Lane {
    LaneState state = LaneState::kWorking;  // see set_state()
    bool peer_fenced = false;
    std::uint8_t pings = 0;     // of a sender, while it is kJoining: outstanding WRITEs that show that it works
    bool used = true;           // it has worked in this round
    std::uint64_t down_ns = 0;  // when it went down
    Watch watch;
    std::uint32_t suspected_completed = 0;  // when the data path saw that the lane is suspected
    std::uint64_t suspected_ns = 0;         // when it first saw that with this count; 0: not yet
    std::vector<std::uint8_t> qps;
  };

  // nullptr where failover is impossible: too many QPs for a notice, or one lane where `reconnects` is false.
  static std::unique_ptr<Failover> create(std::span<const EndpointQp> qps, bool sends, bool reconnects);

  std::size_t lanes() const { return lanes_.size(); }
  // Lanes have the same numbers at both ends: in the order of their first QPs.
  std::size_t lane_of(std::size_t qp) const { return lane_of_qp_[qp]; }
  Lane& lane(std::size_t number) { return lanes_[number]; }
  // Any thread.
  bool works(std::size_t qp) const {
    return (not_working_.load(std::memory_order_relaxed) >> lane_of_qp_[qp] & 1) == 0;
  }
  std::size_t not_working() const {
    return static_cast<std::size_t>(std::popcount(not_working_.load(std::memory_order_relaxed)));
  }
  std::size_t working() const { return lanes() - not_working(); }
  // Whether the comm can go on without any lane, until one comes back.
  bool reconnects() const { return reconnects_; }
  void set_state(std::size_t lane, LaneState state);
  // For statistics: the last outages of all lanes. begin_outage may throw std::bad_alloc.
  void begin_outage(std::size_t lane);
  void end_outage(std::size_t lane);
  const std::vector<LaneOutage>& outages() const { return outages_; }
  // Whether the monitor suspects the lane again, at least `wait_ns` after the data path first saw it, and nothing has
  // completed since. An application that has made no calls for long finds out only then what has completed.
  bool confirms_suspicion(std::size_t lane, std::uint32_t completed, std::uint64_t now, std::uint64_t wait_ns);
  // No lane works. Any thread.
  std::atomic<bool> waits{false};
  // A lane that was used is not fenced at both ends. Any thread.
  std::atomic<bool> fences{false};
  std::uint64_t fenced_ns = 0;  // when QPs of any lane were last moved to ERR
  // The monitor's: why and how long the comm waits, and when it last added to that; 0: not yet.
  LaneWait waits_as = LaneWait::kNone;
  std::uint64_t waited_ns = 0;
  std::uint64_t last_look_ns = 0;

  // A flushed completion of the last lane, whose cause has not come yet.
  struct Flushed {
    FailureState::HeldCompletion completion;
    std::uint64_t since_ns;
  };
  std::unique_ptr<Flushed> flushed;

  // Any thread.
  LaneNotices notices;
  LaneRenewal renewal;

 private:
  explicit Failover(std::vector<Lane> lanes, std::vector<std::uint8_t> lane_of_qp, bool sends, bool reconnects)
      : notices(lanes.size()),
        renewal(lanes.size(), sends),
        lanes_(std::move(lanes)),
        lane_of_qp_(std::move(lane_of_qp)),
        reconnects_(reconnects) {}

  std::vector<Lane> lanes_;
  std::vector<std::uint8_t> lane_of_qp_;
  std::vector<LaneOutage> outages_;
  const bool reconnects_;
  std::atomic<LaneNotices::Lanes> not_working_{0};
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
  static constexpr std::uint32_t kSize = 128;  // the depth of a send queue where there are several lanes

  bool full() const { return posted_ - completed_ >= kSize; }
  // The QP is a new one.
  void restart() {
    posted_ = completed_ = 0;
    immediates_ = 0;
  }
  void add(const SentPart& part, bool immediate) {
    parts_[posted_ % kSize] = part;
    immediate_[posted_ % kSize] = immediate;
    ++posted_;
    if (immediate) ++immediates_;
  }
  // Nothing of it is outstanding any more.
  void clear() { completed_ = posted_; }
  // Any thread.
  std::uint32_t posted() const { return posted_; }
  std::uint32_t completed() const { return completed_; }
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
  SingleWriter<std::uint32_t> posted_;
  SingleWriter<std::uint32_t> completed_;
  std::uint32_t immediates_ = 0;  // posted
};

}  // namespace verbatim
