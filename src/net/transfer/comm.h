// What a send comm and a receive comm share: their end of the connection, the side channel, and how they fail.
//
// Threads: isend, irecv, iflush and test of one comm come from one thread at a time (NCCL's progress thread). At the
// same time another thread may register memory, which uses only the endpoint's ports and the locked caches of the
// devices. Also at the same time, the monitor may call what is marked "any thread", read what does not change after
// connect, and query QP states.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "base/result.h"
#include "channel/channel.h"
#include "net/diagnose/failure.h"
#include "net/transfer/comm_observer.h"
#include "net/transfer/comm_settings.h"
#include "net/transfer/connection_stats.h"
#include "net/transfer/endpoint.h"
#include "net/transfer/failover.h"
#include "net/transfer/failure_state.h"
#include "net/transfer/memory.h"
#include "net/transfer/profiler_events.h"
#include "net/transfer/request.h"
#include "net/transfer/single_writer.h"
#include "wire/notice.h"

namespace verbatim {

enum class CommKind : std::uint8_t { kSend, kRecv };

class Comm {
 public:
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  CommKind kind() const { return kind_; }
  const CommSettings& settings() const { return settings_; }
  Endpoint& endpoint() { return endpoint_; }
  const Endpoint& endpoint() const { return endpoint_; }

  // Connects the QPs to those of `remote` (RTR, then RTS) and keeps the fields of `remote` that the data path needs.
  // False: not yet, see Endpoint::connect.
  virtual Result<bool> connect(const wire::Hello& remote, int traffic_class, VerbBudget& budget) = 0;

  // The hello of this end. The caller adds the listen, the keys, the identity and, in a connect request, the traffic
  // class and the attempt number.
  wire::Hello hello() const;

  // The failure of connect(), or of an earlier step of the handshake: diagnosis and, if a QP could not be modified,
  // path. The caller sets `what`.
  Failure diagnose_setup(const Error& error) const;

  // Both ends of a QP's connection, for messages.
  std::string describe_path(std::size_t qp) const;

  // From Monitor::watch to unwatch it is the monitor's.
  Channel& channel() { return channel_; }

  // Called before the data path runs. The observer sends the failure of this comm to the peer.
  void set_observer(CommObserver* observer) { observer_ = observer; }

  // ---- failure

  // The first error; nullptr while the comm has not failed.
  const Error* error() const { return failure_state_.error(); }
  // Any thread: the published failure, and the text for the peer (see FailureState).
  const Failure* failure() const { return failure_state_.failure(); }
  const std::string* failure_text() const { return failure_state_.text(); }

  // Any thread. The data path processes the event in a later call.
  void set_event(CommEvent event) { failure_state_.set_event(event); }
  // An event after which `device`, or a QP or CQ of this comm on it, cannot be used.
  void set_device_event(ibv_event_type event, const Device& device);
  void clear_event(CommEvent event) { failure_state_.clear_event(event); }
  // See FailureState. Only the monitor calls it.
  void set_channel(ChannelState state, std::uint32_t detail = 0) { failure_state_.set_channel(state, detail); }
  // Why the connection ends. Only the monitor calls it, at most once, before the event kPeerFailed or
  // kFailedByMonitor.
  void set_failure_reason(ErrorKind kind, std::string_view why) { failure_state_.set_reason(kind, why); }

  using enum FailureState::Flag;
  std::uint32_t slow_path_flags() const { return failure_state_.flags(); }
  bool lanes_change() const { return (slow_path_flags() & kLanes) != 0; }

  // Moves the QPs to ERR, so that outstanding work requests end. Errors are only logged.
  void abort();

  // ---- lanes that fail (failover.h); for the monitor

  // False: the peer has sent a notice that this connection cannot get.
  bool receive_lane_down(const wire::LaneDown& down) noexcept;
  bool receive_lane_report(const wire::LaneReport& report) noexcept;
  bool receive_lane_address(wire::MessageType type, const wire::LaneAddress& address) noexcept;
  bool can_lose_lanes() const { return failover_ != nullptr && failover_->lanes() > 1; }
  // Any thread.
  std::size_t lanes_down() const { return failover_ != nullptr ? failover_->not_working() : 0; }
  bool can_wait() const { return failover_ != nullptr; }
  // What keeps messages from moving. Any thread.
  LaneWait lane_wait() const {
    if (failover_ == nullptr) return LaneWait::kNone;
    if (failover_->waits) return LaneWait::kForLane;
    return failover_->fences ? LaneWait::kForAgreement : LaneWait::kNone;
  }
  // How long it has waited in this way, without the time in which only the peer, or an application, can go on. Only the
  // monitor calls it, often.
  std::uint64_t waited_ns(std::uint64_t now);
  // Any thread: the addresses of this end that lanes which work have on a port. A lane that came back may have another
  // one than the rest.
  std::vector<GidEntry> gids(const Device& device, std::uint8_t port_num) const;
  // The link of a port is down, or an address of it has changed: the lanes that have it are down, if others are left.
  void port_down(const Device& device, std::uint8_t port_num);
  void gid_changed(const Device& device, std::uint8_t port_num, const GidEntry& gid);
  // The link of a port is up, or its addresses have changed.
  void port_up(const Device& device, std::uint8_t port_num);
  // When renew_lanes() has something to do.
  std::uint64_t renewal_due_ns() const { return failover_ != nullptr ? failover_->renewal.due_ns() : kNever; }
  // Takes down lanes on which nothing is acknowledged while it is on another one (VERBATIM_LANE_TIMEOUT_MS). Returns
  // when it is to be called again. Only the monitor calls it.
  std::uint64_t watch_lanes(std::uint64_t now);
  // A CTS entry has not arrived at the peer: takes down the lane that carries them, if another one works. Otherwise it
  // makes sure that a completion which says why is polled.
  void suspect_cts();
  // Makes new QPs for lanes that are down. Calls verbs that may hang; only DeviceCalls calls it.
  void renew_lanes() noexcept;
  bool has_lane_notice() const { return failover_ != nullptr && failover_->notices.has_notice(); }
  // After has_lane_notice(): the next one to send.
  std::optional<wire::Notice> take_lane_notice() { return failover_->notices.take_notice(); }
  // Any thread: whether only lanes that are down have the GID that is this address, of this end or of the peer.
  bool has_lane_down(const std::array<std::uint8_t, 16>& own, const std::array<std::uint8_t, 16>& peer) const;
  // An application that waits for nothing may not call: then the monitor acts for it. It declares lanes down whose port
  // is, and reports to the peer that everything has arrived. Whether it has to look again.
  bool advance_lanes_for_idle() noexcept;
  // Whether lanes change, and advance_for_idle() may go on with them.
  bool can_advance_for_idle() const {
    return kind_ == CommKind::kRecv && failover_ != nullptr && lanes_change() && !failure_state_.has_failed();
  }
  // What a call of the application would do for lanes that change, if the application has no request and is in no call.
  // Calls verbs that may hang; only DeviceCalls calls it. False: it is in a call, or has requests and so will call.
  virtual bool advance_for_idle() noexcept { return false; }
  // The application closes the comm: from now on advance_for_idle() does nothing, and it does not run.
  virtual void stop_monitor_acting() noexcept {}

  // ---- for the monitor and for statistics

  bool uses(const Device& device, std::uint8_t port_num = 0) const;  // 0: any port
  bool uses(const ibv_qp& qp) const;
  bool uses(const ibv_cq& cq) const;
  // ERR if a QP is in ERR, else the state of the first QP that is not in RTS, else RTS. IBV_QPS_UNKNOWN if a query
  // fails. Queries the device, which may be slow or hang.
  ibv_qp_state qp_state() const;
  // The first device whose QPs are in ERR or cannot be queried; nullptr: all can be used.
  const Device* failed_device() const;

  // Whether every request is done: then the QPs may outlive the call that closes the comm. Optional receives are done
  // when they are posted, although their data may arrive later: only the application knows whether it has arrived.
  virtual bool all_done() const = 0;
  // Whether an outstanding operation waits for a message of the peer, not only for an acknowledgement by its NIC.
  virtual bool waits_for_peer() const = 0;
  // Messages and bytes of the connection. Not to be called while the data path runs.
  virtual TransferCounts transfer_counts() const = 0;
  // The messages and bytes that are known to be complete.
  virtual CompletedCounts completed_counts() const = 0;
  ConnectionStats stats() const;
  // Why immediates are used although VERBATIM_COMPLETION=atomic is set; nullptr otherwise. Valid after connect.
  const char* atomics_refused() const { return atomics_refused_; }

  // Any thread: the current status of this end, without the fields that the monitor sets (MonitoredConnection::status).
  virtual wire::ConnectionStatus status() const = 0;
  // Any thread: the QP that has the most outstanding work requests, probes of the peer's NIC included; none: nothing is
  // outstanding, or the comm does not know it.
  virtual std::optional<std::size_t> busiest_qp() const { return std::nullopt; }
  // Any thread: a number that changes when RDMA of the peer arrives. While it changes the peer lives.
  virtual std::uint64_t peer_progress() const = 0;
  // Any thread: how often the peer's NIC has answered since the event kProbePeer.
  std::uint32_t probes_answered() const { return probes_answered_; }
  // Any thread: how often the CQs were polled until they were empty while the answer to a probe was outstanding.
  std::uint32_t polls_without_answer() const { return polls_without_answer_; }
  // The calls of the application since the last take_activity(). Only the monitor calls it.
  struct Activity {
    bool send_refused = false;  // an isend found no receive
    bool tested = false;        // a test found its request not done
  };
  virtual Activity take_activity() = 0;

  // With VERBATIM_LATENCY: any thread. Empty: not measured.
  virtual LatencyStats latencies() const = 0;

  // Any thread.
  Result<std::unique_ptr<MemoryHandle>> register_memory(const MrRequest& request);

 protected:
  Comm(CommKind kind, const CommSettings& settings, Endpoint endpoint, ControlMemory control);

  // Any thread. A receive comm has QPs of its own for flushes.
  virtual bool uses_for_flush(const ibv_qp&) const { return false; }

  // The part of the control memory that the peer writes: the CTS ring or the completion record.
  virtual const void* peer_written_memory() const = 0;
  // wire::Capability bits of the hello.
  virtual std::uint32_t capabilities() const = 0;

  // At the end of connect, if NCCL's profiler gets events.
  std::unique_ptr<ProfilerEvents> make_profiler_events() const;

  // ---- lanes that fail

  // After connect.
  void enable_failover();
  // Whether the failed completion is of a lane that is down, or takes it down. False: the comm fails.
  template <typename Describe>
  bool lane_failed(const ibv_wc& completion, std::size_t qp, Describe describe_work) noexcept {
    if (failover_ == nullptr || error() != nullptr) return false;
    // rxe refuses to send while the link is down, instead of retrying.
    const bool refused = completion.status == IBV_WC_LOC_QP_OP_ERR;
    if (completion.status != IBV_WC_RETRY_EXC_ERR && !refused && completion.status != IBV_WC_WR_FLUSH_ERR) return false;
    const LaneState state = failover_->lane(failover_->lane_of(qp)).state;
    if (state != LaneState::kWorking && state != LaneState::kJoining) {
      failure_state_.set_flag(FailureState::Flag::kLanes);  // it may be drained now
      return true;
    }
    if (refused && !link_goes_down(qp)) return false;
    const bool unreachable = completion.status != IBV_WC_WR_FLUSH_ERR;
    const bool is_last = state == LaneState::kWorking && failover_->working() == 1;
    const bool may_wait = can_wait_for_lane(refused || endpoint_.link_was_down(qp));
    if (!unreachable && is_last && may_wait) return await_cause(completion, qp, describe_work());
    return (state == LaneState::kJoining || failover_->working() > 1 || (unreachable && may_wait)) &&
           take_lane_down(qp, [&] { return completion_failure(completion, qp, describe_work()); });
  }
  // Whether a failed completion is of a QP that the lane had before.
  bool is_of_earlier_qp(const ibv_wc& completion, std::size_t qp) const {
    return failover_ != nullptr && completion.qp_num != endpoint_.qps()[qp].qp->qp_num;
  }
  // A WRITE that shows that a lane works has completed.
  void ping_answered(std::size_t qp) {
    std::uint8_t& pings = failover_->lane(failover_->lane_of(qp)).pings;
    if (pings == 0) return;
    pings_left_ -= 1;
    if (--pings == 0) failure_state_.set_flag(kLanes);
  }
  void pings_posted(std::size_t lane, std::uint8_t count) {
    failover_->lane(lane).pings = count;
    pings_left_ += count;
  }
  // A failed completion of a probe, on a lane that is down.
  void probe_dropped() {
    probes_left_ -= 1;
    if (probes_left_ != 0) return;
    if (std::exchange(probe_was_answered_, false)) ++probes_answered_;
    failure_state_.clear_flag(kProbing);
  }
  bool works(std::size_t qp) const { return failover_ == nullptr || failover_->works(qp); }
  // Whether a lane that works, or joins, uses this end's port.
  bool port_is_used(std::size_t port) const;
  // See qp_shares in lanes.h: of the lanes that work, at least one.
  std::vector<std::uint32_t> working_shares() const;
  // Advances the lanes. Called with the flag kLanes set, after a poll of all CQs; `all_polled`: until they were empty.
  void process_lanes(bool all_polled) noexcept;

  // The lane is not used any more, its QPs are in ERR.
  virtual void stop_lane(std::size_t lane) = 0;
  // The link of this end's port is down, and no lane that works uses it.
  virtual void stop_port(std::size_t) noexcept {}
  // Whether the sends of a sender, or the posted receives of a receiver, have completed on the lane.
  virtual bool lane_drained(std::size_t lane) const = 0;
  // What lanes that have failed carried into GPU memory is there.
  virtual void late_bytes_have_come() noexcept {}
  // This end is fenced: what it reports to the peer.
  virtual wire::LaneReport lane_report(std::size_t lane) = 0;
  // Both ends are fenced: nothing that was posted on the lane has an effect any more. nullopt: the peer has closed the
  // connection gracefully, so everything has arrived.
  virtual void recover_lane(std::size_t lane, const std::optional<wire::LaneReport>& peer) = 0;
  // Whether everything that was missing has been posted again and acknowledged. Then normal work goes on.
  virtual bool recovered() = 0;
  virtual void finish_recovery() = 0;
  // The endpoint has new QPs for the lane, which is kJoining.
  virtual void adopt_lane(std::size_t lane) = 0;
  // Flushes use the port again; see FlushQueue::restore.
  virtual bool restore_flush_qp(std::size_t, UniqueQp&) { return true; }
  // The lane works.
  virtual void use_lane(std::size_t lane) = 0;
  // There is no memory to go on without a lane that has failed.
  void fail_without_memory() noexcept;
  // Any thread: whether flushes leave out the port, and are prepared.
  virtual bool needs_flush_qp(std::size_t) const { return false; }
  // Any thread: parts of messages that were posted on the lane's QPs, and those that are acknowledged, modulo 2^32.
  struct LaneProgress {
    std::uint32_t posted = 0;
    std::uint32_t completed = 0;
  };
  virtual LaneProgress lane_progress(std::size_t) const { return {}; }
  // Any thread: the number of receives posted so far, if all of them have arrived.
  virtual std::optional<std::uint32_t> all_arrived() const { return std::nullopt; }
  // Any thread: writes the CTS entries again if one of these lanes carries them. False: impossible.
  virtual bool rewrite_ring_without(LaneNotices::Lanes) noexcept { return true; }

  // The kind of the first error, kNone while the comm has not failed. Calls of the data path return it.
  ErrorKind result() const { return failure_state_.kind(); }

  // Logs and keeps the first error of the comm; later ones follow from it and are dropped. `describe` returns a
  // Failure.
  template <typename Describe>
  void fail(ErrorKind kind, const char* operation, Describe describe) noexcept {
    if (failure_state_.record(kind, operation)) publish_from(describe);
  }
  // The same, and adds the diagnosis and the facts of a QP's connection. `describe` returns the text `what`.
  template <typename Describe>
  void fail(ErrorKind kind, const char* operation, std::size_t qp, Diagnosis (*diagnose)(const PathFacts&),
            Describe describe) noexcept {
    fail(kind, operation, [&] {
      const PathFacts path = facts(qp);
      return Failure{describe(), diagnose(path), path};
    });
  }
  // The same for a failed completion. It is logged when all completions have been polled, because a flushed work
  // request may come before the one that is the cause (FailureState::record_completion).
  void fail_completion(const ibv_wc& completion, std::size_t qp, const FailedWork& work) noexcept;
  void fail_post(const char* operation, int returned, std::size_t qp) noexcept;
  void fail_poll(std::size_t cq) noexcept;
  void log_held_completion() noexcept;

  PathFacts facts(std::size_t qp) const;

  // To be called only after a poll that emptied the CQs: completions from before the peer ended are processed first.
  // `waits_for_message`: the caller needs a message of the peer.
  void check_events(bool waits_for_message) {
    if ((slow_path_flags() & (kCommEvents | kProbing)) != 0) process_events(waits_for_message);
  }
  // Whether any comm event is set that ends the connection: then no further message is posted.
  bool is_peer_or_device_dead() const {
    constexpr std::uint32_t kHarmless =
        static_cast<std::uint32_t>(CommEvent::kPeerClosed) | static_cast<std::uint32_t>(CommEvent::kProbePeer);
    return (slow_path_flags() & kCommEvents & ~kHarmless) != 0;
  }
  bool is_probing() const {
    return (slow_path_flags() & (kProbing | static_cast<std::uint32_t>(CommEvent::kProbePeer))) != 0;
  }

  // Posts a signalled WRITE of zero bytes on this QP, which counts as one of the comm's work requests until
  // it completes. False, and nothing is posted, when the send queue has no free entry: then other work is outstanding,
  // whose completion shows whether the peer lives. `returned`: of ibv_post_send.
  virtual bool post_probe(std::size_t qp, int& returned) noexcept = 0;
  virtual bool carries_cts(std::size_t) const { return false; }
  // Its WRITE has completed.
  void probe_answered() {
    probes_left_ -= 1;
    probe_was_answered_ = probes_left_ != 0;
    if (probe_was_answered_) return;
    ++probes_answered_;
    failure_state_.clear_flag(kProbing);
  }
  // Outstanding probes, and WRITEs that show that a lane works.
  std::uint32_t probes_left() const { return probes_left_ + pings_left_; }

  static constexpr FailedWork kProbeWork = {
      .operation_text = "a WRITE of 0 bytes, to learn whether its NIC answers,", .bytes = std::nullopt, .probe = true};

  // Completions polled at a time.
  static constexpr int kPollBatch = 8;

  SingleWriter<bool> tested_;  // a test found its request not done

  // A member, not a local array: calls that find nothing then save no registers.
  ibv_wc completions_[kPollBatch];
  const CommSettings& settings_;
  std::unique_ptr<ProfilerEvents> profiler_events_;
  const char* atomics_refused_ = nullptr;
  ControlMemory control_;  // outlives the QPs through which the peer writes it
  Endpoint endpoint_;
  ibv_cq* const first_cq_;
  FailureState failure_state_;
  std::unique_ptr<Failover> failover_;  // nullptr: the comm fails with its first lane

 private:
  template <typename Describe>
  bool take_lane_down(std::size_t qp, Describe describe) noexcept {
    const std::size_t lane = failover_->lane_of(qp);
    const bool worked = failover_->works(qp);
    fence_lane(lane);  // first: what describe() reads takes a while
    try {
      log_lane_down(lane, worked, describe());
    } catch (...) {
      VERBATIM_WARN("a lane of a connection is down, and there is no memory to say how");
    }
    return true;
  }
  bool await_cause(const ibv_wc& completion, std::size_t qp, const FailedWork& work) noexcept;
  bool awaits_cause() noexcept;
  Failure completion_failure(const ibv_wc& completion, std::size_t qp, const FailedWork& work) const;
  void log_lane_down(std::size_t lane, bool worked, const Failure& failure) const;
  void fence_lane(std::size_t lane) noexcept;
  bool is_on(std::size_t qp, const Device& device, std::uint8_t port_num) const;
  void receive_event(LaneNotices::Lanes lanes);
  bool takes_down(const LaneNotices::Incoming& incoming, LaneNotices::Lanes events, std::size_t lane) const;
  // Any thread: events of ports have no effect while no other lane is left. Now one may be. `up`: a port that is not
  // down any more.
  void repeat_port_events(const Port* up);
  // `is_known`: why the lane does not work, by a link or by the peer, which waits. Else a path that has never worked is
  // not waited for.
  bool can_wait_for_lane(bool is_known = false) const;
  bool link_goes_down(std::size_t qp) const;
  void receive_lane_notices();
  void advance_lane(std::size_t lane, bool may_be_late);
  void adopt_new_qps(std::size_t lane);
  void lane_joined(std::size_t lane);
  void log_lane_up(std::size_t lane) const;
  std::string bandwidth_left() const;
  void fail_last_lane(std::size_t lane) noexcept;
  ibv_qp_state query_state(const EndpointQp& end) const;
  void process_events(bool waits_for_message) noexcept;
  template <typename Describe>
  void publish_from(Describe describe) noexcept {
    try {
      publish(std::make_unique<Failure>(describe()));
    } catch (...) {
      publish_without_memory();
    }
  }
  void publish(std::unique_ptr<Failure> failure);
  void publish_without_memory() noexcept;
  void post_probes() noexcept;
  Failure peer_ended() const;
  Failure peer_lost(const FailureState::HeldCompletion& held, const PathFacts& path) const;
  Failure device_event() const;
  bool wait_for_device_event() const;

  const CommKind kind_;
  SingleWriter<std::uint32_t> polls_without_answer_;
  std::uint64_t peer_end_detected_ns_ = 0;
  std::uint64_t device_event_ns_ = 0;        // when a call has found the first one
  SingleWriter<std::uint32_t> probes_left_;  // outstanding
  SingleWriter<std::uint32_t> probes_answered_;
  bool probe_was_answered_ = false;  // one of several that are outstanding
  CommObserver* observer_ = nullptr;
  SingleWriter<std::uint32_t> pings_left_;
  bool recovering_ = false;  // a lane has failed, and what is missing is not posted again
  // Held while the data path replaces QPs of the endpoint, and where other threads read them. DeviceCalls alone
  // destroys QPs that were replaced.
  mutable Mutex qps_mutex_;
  Channel channel_;
};

// Converts the void* by which NCCL knows a send or recv comm.
inline Comm* as_comm(void* comm) {
  return static_cast<Comm*>(comm);
}

}  // namespace verbatim
