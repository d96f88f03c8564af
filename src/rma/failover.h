// The lanes of a set of contexts to each rank that fail. A lane is a pair of ports, one at each rank, with one QP for
// each context. The first lane is used; when it fails, the next one is, and so on:
//
//   failed          by a completion, an event of the port, no progress for VERBATIM_LANE_TIMEOUT_MS, or a message of
//                   the peer: nothing is posted on it any more
//   fenced          its QPs are in ERR, so they execute nothing more. The PSN that each expects, which says what it has
//                   executed, is sent to the peer
//   fenced by both  and its work requests have completed: the data path knows which of them the peer has executed, and
//                   posts the others on the next lane (context_lanes.cc)
//
// The last lane cannot fail here: what happens on it is the failure of the communicator. Any thread; the verbs are
// called by a thread of this object, which ends when it has nothing to do.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "verbs/device.h"

namespace verbatim::rma {

class ContextSet;

class Failover {
 public:
  // PSNs by context, see wire::RmaLaneFenced.
  using Psns = std::vector<std::uint32_t>;
  using Send = std::function<void(std::uint32_t peer, std::uint32_t lane, const Psns& psns)>;

  // `lanes`: their number by peer index, oneself last. `send`: gives the PSNs of a fenced lane to a peer.
  Failover(const ContextSet& set, const std::vector<std::uint32_t>& lanes, Send send);
  ~Failover();
  Failover(const Failover&) = delete;
  Failover& operator=(const Failover&) = delete;

  // False: there is no further lane. The first call for a lane is logged.
  bool lane_failed(std::uint32_t peer, std::uint32_t lane, const std::string& why) VERBATIM_EXCLUDES(mutex_);
  void port_down(const Device& device, std::uint8_t port) VERBATIM_EXCLUDES(mutex_);
  // The peer's message.
  void peer_fenced(std::uint32_t peer, std::uint32_t lane, const Psns& psns) VERBATIM_EXCLUDES(mutex_);

  // Without a lock.
  bool has_failed(std::uint32_t peer, std::uint32_t lane) const { return at(peer, lane).failed.load(); }
  bool has_changes() const { return changes_.load() != 0; }

  // The peer's PSNs of a lane that is fenced by both.
  std::optional<Psns> fenced_by_both(std::uint32_t peer, std::uint32_t lane) VERBATIM_EXCLUDES(mutex_);
  // The data path has left the lane.
  void left_lane() { --changes_; }

 private:
  struct Lane {
    std::atomic<bool> failed{false};
    bool fenced = false;  // these two: under the mutex
    std::optional<Psns> peer_psns;
  };
  struct Job {
    std::uint32_t peer = 0;
    std::uint32_t lane = 0;
  };

  Lane& at(std::uint32_t peer, std::uint32_t lane) const { return lanes_[peer][lane]; }
  bool is_last(std::uint32_t peer, std::uint32_t lane) const { return lane + 1 >= lane_counts_[peer]; }
  // Whether this is the first word of it.
  bool begin(std::uint32_t peer, std::uint32_t lane) VERBATIM_EXCLUDES(mutex_);
  void start_thread() VERBATIM_REQUIRES(mutex_);
  void run() noexcept VERBATIM_EXCLUDES(mutex_);
  void fence(const Job& job) VERBATIM_EXCLUDES(mutex_);

  const ContextSet& set_;
  const std::vector<std::uint32_t> lane_counts_;
  const Send send_;
  std::vector<std::unique_ptr<Lane[]>> lanes_;
  std::atomic<std::uint32_t> changes_{0};  // lanes that have failed and that the data path has not left
  Mutex mutex_;
  std::deque<Job> jobs_ VERBATIM_GUARDED_BY(mutex_);
  bool running_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace verbatim::rma
