// The lanes of a set of contexts to each rank: which of them can be used, how one is left that fails, and how it comes
// back. A lane is a pair of ports, one at each rank, with one QP for each context. An end posts on its first lane that
// can be used. Both ends take the same steps, each at its own time:
//
//   kUsed       a completion, an event of the port, no progress for VERBATIM_LANE_TIMEOUT_MS, or a message of the peer
//               says that the lane has failed
//   kFailed     its QPs go to ERR, so they execute nothing more. kFenced gives the peer the PSN that each expects. That
//               says what it has executed. With the peer's, the data path posts what was not executed on another lane
//               (context_lanes.cc), and has left this one. Then, when the link of the port has been up for a while,
//               and it is known what its device reports, the QPs go back to INIT, and kOffered gives the peer the
//               address
//   kOffered    with the peer's kOffered the QPs go to RTS, and kConnected says so
//   kConnected  with the peer's kConnected a WRITE of 0 bytes shows whether the path works
//   kProbed     when it has completed, the lane is kUsed again
//
// A failure leads from any step to kFailed. The number of the round is in every message; kOffered begins a round. A
// lane to oneself needs no messages. A late packet of an earlier round has no effect: the PSNs of a round begin far
// from the last ones.
//
// What has come into GPU memory over a port is known to be there only by a READ over it (ContextSet::post_reads). So
// the lanes to other ranks over a port are left each time that the one to oneself fails, or does not come back.
//
// The last lane to a rank fails only when the NIC's retries are used up, when the GID of its port has changed, with the
// one to oneself, or by a message of the peer. Then operations wait until a lane comes back, VERBATIM_RECONNECT_S at
// most. Any thread; the verbs are called by a worker, which has a thread only while there is something to do, or to be
// done at some time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "base/mutex.h"
#include "base/result.h"
#include "runtime/worker.h"
#include "verbs/device.h"
#include "verbs/gid.h"
#include "wire/rma.h"

namespace verbatim::rma {

class ContextSet;
struct LaneQp;

inline constexpr std::uint32_t kNoLane = 0xffffffff;

class Failover {
 public:
  using Psns = std::vector<std::uint32_t>;  // by context
  // Gives a message to a peer.
  using Send = std::function<void(std::uint32_t peer, const wire::RmaLane& message)>;

  // A peer after the set-up.
  struct Peer {
    std::uint32_t psn = 0;                 // of the first packet that its QPs expect
    std::vector<std::uint32_t> connected;  // by lane: the contexts whose QPs could be connected, from the first one on
  };

  // `peers`: by index, oneself last.
  Failover(const ContextSet& set, const Config& config, const std::vector<Peer>& peers, Send send);
  Failover(const Failover&) = delete;
  Failover& operator=(const Failover&) = delete;

  // The first call for a lane is logged. False: no other lane can be used, and the communicator must not wait for one,
  // or kKeep says that this one stays in use then.
  enum class Last : bool { kKeep, kLeave };
  static constexpr const char* kLookAtPorts = "look at this port, its cable and its switch, at both ends";
  bool lane_failed(std::uint32_t peer, std::uint32_t lane, Last last, const char* why, const char* next = kLookAtPorts)
      VERBATIM_EXCLUDES(mutex_);
  void port_down(const Device& device, std::uint8_t port, const char* why = "its link is down")
      VERBATIM_EXCLUDES(mutex_);
  // The GID table of a port has changed.
  void gids_changed(const Device& device, std::uint8_t port) VERBATIM_EXCLUDES(mutex_);
  void receive(std::uint32_t peer, const wire::RmaLane& message) VERBATIM_EXCLUDES(mutex_);

  // Without a lock.
  bool is_used(std::uint32_t peer, std::uint32_t lane) const { return at(peer, lane).used.load(); }
  // False: nothing of any rank comes over this port, and nothing has come for 10 ms.
  bool is_open(std::uint32_t port) const VERBATIM_EXCLUDES(mutex_);
  // The lane to post on; kNoLane: none can be used now.
  std::uint32_t lane_for(std::uint32_t peer) const { return first_used_[peer].load(); }

  // ---- data path

  // Whether lanes have failed that it has not left, or others can be used.
  bool has_changes() const { return to_leave_.load() != 0 || changed_.load(); }
  struct Left {
    std::uint32_t peer = 0;
    std::uint32_t lane = 0;
    std::optional<Psns> psns;  // the peer's, when the lane is fenced at both ends
  };
  // The lanes that it must leave.
  std::vector<Left> take_lanes_to_leave() VERBATIM_EXCLUDES(mutex_);
  // Nothing that it has posted on the lane is outstanding.
  void left(std::uint32_t peer, std::uint32_t lane) VERBATIM_EXCLUDES(mutex_);
  // It begins to use a lane with the QP of this context. Returns the PSN of its next packet; nullopt: the lane has
  // failed meanwhile.
  std::optional<std::uint32_t> enter(std::uint32_t peer, std::uint32_t lane, std::uint32_t context)
      VERBATIM_EXCLUDES(mutex_);
  // It leaves a lane that works, and may enter it again: `psn` is that of the next packet of this context's QP.
  void leave_for_now(std::uint32_t peer, std::uint32_t lane, std::uint32_t context, std::uint32_t psn)
      VERBATIM_EXCLUDES(mutex_);
  // The WRITE of 0 bytes has completed.
  void probe_ended(std::uint32_t peer, std::uint32_t lane, bool works) VERBATIM_EXCLUDES(mutex_);

 private:
  enum class Step : std::uint8_t { kUsed, kFailed, kOffered, kConnected, kProbed };
  struct Lane {
    std::atomic<bool> used{true};
    // The rest is under the mutex.
    Step step = Step::kUsed;
    std::uint32_t round = 0;
    std::uint32_t changes = 0;     // of `step` or `round`: a step that was made meanwhile has no effect
    unsigned unused_rounds = 0;    // in succession
    bool fenced = false;           // kFailed: this end
    bool entered = false;          // by the data path, since it can be used
    bool left = true;              // by the data path, since it has failed
    bool probing = false;          // the WRITE of 0 bytes has not completed
    bool peer_fenced = false;      // kFailed
    std::uint32_t connected = 0;   // contexts whose QPs are connected in this round
    std::optional<Psns> executed;  // by the peer when the lane was used
    std::optional<wire::RmaLane> peer_offer;
    bool peer_connected = false;
    std::uint64_t due_ns = 0;  // when to look at the port
    Psns expected;             // by this end's QPs: at the beginning of the round, and when they were fenced if known
    Psns first;                // of this end's next packets on a lane that it does not post on; by context
    GidEntry gid;              // of this end's port
    bool look_at_gid = false;  // it may have changed
  };
  // What the worker does next with a lane.
  enum class Action : std::uint8_t { kNothing, kCheckGid, kFence, kOffer, kConnect, kProbe };
  struct Job {
    Action action = Action::kNothing;
    std::uint32_t peer = 0;
    std::uint32_t lane = 0;
    std::uint32_t round = 0;
    std::uint32_t changes = 0;
    std::uint32_t connected = 0;
    Psns expected = {};
    std::optional<wire::RmaLane> peer_offer = std::nullopt;
  };

  Lane& at(std::uint32_t peer, std::uint32_t lane) const { return lanes_[peer][lane]; }
  // Whether this lane can be left without a wait. That to oneself: by all ranks that it takes with it.
  bool has_other(std::uint32_t peer, std::uint32_t lane) const;
  void begin_failure(std::uint32_t peer, std::uint32_t lane) VERBATIM_REQUIRES(mutex_);
  // Ranks whose lane over a port was left, and those whose lane was kept because they have no other one.
  struct PortLeft {
    std::size_t with_other = 0;
    std::size_t without = 0;
  };
  PortLeft leave_port(std::uint32_t port) VERBATIM_REQUIRES(mutex_);
  void set_used(std::uint32_t peer, std::uint32_t lane, bool used) VERBATIM_REQUIRES(mutex_);
  void use(std::uint32_t peer, std::uint32_t lane) VERBATIM_REQUIRES(mutex_);
  void change(Lane& lane, Step step) VERBATIM_REQUIRES(mutex_);
  void wake_worker() VERBATIM_REQUIRES(mutex_);
  // Does the next job. Returns when the one after it is due, as Worker::Work does.
  std::uint64_t advance() noexcept VERBATIM_EXCLUDES(mutex_);
  Action action_of(const Lane& lane, bool own, std::uint64_t now, std::uint64_t& due_ns) const
      VERBATIM_REQUIRES(mutex_);
  // The next job; with none, the worker waits until `due_ns`.
  Job next_job(std::uint64_t now, std::uint64_t& due_ns) VERBATIM_REQUIRES(mutex_);
  void check_gid(const Job& job) VERBATIM_EXCLUDES(mutex_);
  void fence_all() VERBATIM_EXCLUDES(mutex_);
  void fence(const Job& job, const std::vector<LaneQp>& qps) VERBATIM_EXCLUDES(mutex_);
  void offer(const Job& job) VERBATIM_EXCLUDES(mutex_);
  void connect(const Job& job) VERBATIM_EXCLUDES(mutex_);
  void probe(const Job& job) VERBATIM_EXCLUDES(mutex_);
  // All lanes over the port.
  void put_off(const Job& job, std::uint64_t pause_ns) VERBATIM_EXCLUDES(mutex_);
  void send(const Job& job, wire::RmaLane message) const;

  const ContextSet& set_;
  const Config& config_;
  std::vector<std::uint32_t> lane_counts_;  // by peer
  const Send send_;
  std::vector<std::unique_ptr<Lane[]>> lanes_;
  std::unique_ptr<std::atomic<std::uint32_t>[]> first_used_;  // by peer
  std::atomic<std::uint32_t> to_leave_{0};                    // lanes
  std::atomic<bool> changed_{false};
  mutable Mutex mutex_;
  // When to try again to start a thread; 0: that has not failed.
  std::uint64_t retry_ns_ VERBATIM_GUARDED_BY(mutex_) = 0;
  Worker worker_;
};

}  // namespace verbatim::rma
