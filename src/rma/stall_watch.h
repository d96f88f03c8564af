// What the monitor sees of a set of contexts: puts, signals, gets and flushes that do not complete, and what each
// context has carried to each peer. Owned by a coll comm, which makes it for a set in use, and destroys it before the
// set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/config.h"
#include "net/diagnose/diagnosis.h"
#include "net/monitor/rma_sets.h"
#include "rma/context_set.h"

namespace verbatim::rma {

class StallWatch final : public MonitoredRmaSet {
 public:
  StallWatch(const ContextSet& set, Failures& failures, RmaSets& monitored, const Config& config);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  bool check_stalls(const StallSettings& settings, std::uint64_t now) noexcept override;
  void device_event(const Device& device, const ibv_async_event& event) noexcept override;
  RmaStats stats(std::uint64_t number, std::uint64_t now) const override;

 private:
  // The queue of one context and one peer, as last seen.
  struct Watched {
    std::uint64_t completed = 0;
    std::uint64_t pieces = 0;
    std::uint64_t progress_ns = 0;  // when something last completed, or nothing was outstanding
    std::uint32_t lane = 0;
    std::uint64_t lane_failed_ns = 0;  // when its failure was first seen; 0: it has not failed
    bool waits = false;                // something was outstanding at the last check
    bool reported = false;
  };
  // The queues of one peer.
  struct Stalled {
    std::vector<std::size_t> fresh;  // to be reported
    std::size_t reported = 0;        // before, and without progress since
    std::size_t recovered = 0;
    std::uint64_t recovered_after_ns = 0;
  };

  // Nothing is known of a time in which this process was stopped.
  void skip_gap(const StallSettings& settings, std::uint64_t now);
  // What is late, and what to do. Of a queue with something outstanding.
  Diagnosis diagnose(const PeerQueue& queue, std::uint64_t now) const;
  bool is_polled(std::uint64_t now) const { return polled_ns_ != 0 && now - polled_ns_ <= recent_ns_; }
  void check_peer(const StallSettings& settings, std::size_t peer, std::uint64_t now, bool* outstanding);
  void report(const std::vector<std::size_t>& queues, std::uint64_t now) const;
  void fail_without_lane(const PeerQueue& queue, std::uint64_t waited_ns) const noexcept;
  void fail(const PeerQueue& queue, std::uint64_t stalled_ns, std::uint64_t now) const noexcept;

  const ContextSet& set_;
  Failures& failures_;
  RmaSets& monitored_;
  const std::uint64_t lane_timeout_ns_;   // without progress for so long, a lane has failed; 0: never
  const std::uint64_t no_lane_limit_ns_;  // how long operations wait when no lane can be used
  const bool remembers_;                  // what the set has carried is for the file of statistics
  // The rest is the monitoring thread's.
  std::vector<Watched> watched_;  // by queue of the set
  std::uint64_t checked_ns_ = 0;
  std::uint64_t polled_ns_ = 0;  // the last check before which the application has polled
  std::uint64_t recent_ns_ = 0;
  std::uint64_t poll_ended_ns_ = 0;  // the last check before which a poll had begun that has ended since
};

}  // namespace verbatim::rma
