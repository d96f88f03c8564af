// The receiving end of a connection. irecv writes CTS entries into the sender's ring; an immediate or an arrival word
// signals that a group has arrived; iflush makes data that arrived in GPU memory visible to the GPU.
//
// recv_comm.cc has the set-up and irecv, recv_comm_completions.cc test and completions, recv_comm_flush.cc flushes,
// recv_comm_failover.cc what is written again when a lane fails.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "net/transfer/comm_progress.h"
#include "net/transfer/flush_queue.h"
#include "net/transfer/latencies.h"
#include "wire/completion.h"
#include "wire/cts.h"

namespace verbatim {

class RecvComm final : public CommProgress<RecvComm> {
 public:
  // The endpoint that a receive comm on `ports` needs for the QPs of `peer`.
  static EndpointSizes endpoint_sizes(const Config& config, std::span<const Port* const> ports,
                                      const wire::Hello& peer);

  // Bytes of the control memory. `atomic`: atomics signal arrivals.
  static std::size_t control_bytes(std::size_t devices, bool atomic);

  // Arrivals are signalled by atomics where they are configured and both ends support them.
  static Result<std::unique_ptr<RecvComm>> create(const CommSettings& settings, Endpoint endpoint,
                                                  const wire::Hello& peer);

  Result<bool> connect(const wire::Hello& remote, int traffic_class, VerbBudget& budget) override;

  // Posts a receive of `n` members, 1 to VERBATIM_MAX_RECVS. `handles` are MemoryHandle, or null for zero bytes.
  // `*request` may be kOptionalCompletion: then the receive is done at once, and `test` reports the posted sizes.
  // `*request` becomes nullptr when the receive cannot be posted yet: call again.
  ErrorKind irecv(int n, void* const* data, const std::size_t* sizes, const int* tags, void* const* handles,
                  void** request) noexcept;

  // The same where observed(). `profiler_handles`: of the members, may be nullptr.
  ErrorKind irecv_observed(int n, void* const* data, const std::size_t* sizes, const int* tags, void* const* handles,
                           void* const* profiler_handles, void** request) noexcept;
  // Whether latencies are measured, or NCCL's profiler gets events.
  bool observed() const { return observed_; }

  // Makes what arrived in `data` visible to the GPU. nullptr without error(): nothing needs to be flushed. The first
  // call for GPU memory creates the flush QPs.
  Request* iflush(const void* data, const MemoryKeys& memory);

  // Whether `request` is done; if so it is free again, and `sizes` (which may be nullptr) has the bytes of every
  // member. The function for each RequestKind; a flush has no sizes.
  static ErrorKind test(Request& request, int* done, int* sizes) noexcept;
  static ErrorKind test_atomic(Request& request, int* done, int* sizes) noexcept;
  static ErrorKind test_flush(Request& request, int* done, int* sizes = nullptr) noexcept;
  static ErrorKind test_timed(Request& request, int* done, int* sizes) noexcept;
  static ErrorKind test_timed_atomic(Request& request, int* done, int* sizes) noexcept;
  static ErrorKind test_profiled(Request& request, int* done, int* sizes) noexcept;

  // What a test of a request does beside it; an application has no such call.
  void progress() {
    begin_call();
    const Call call(*this);
    if (!monitor_acts()) CommProgress::progress();
  }

  TransferCounts transfer_counts() const override;
  wire::ConnectionStatus status() const override;
  // Optional receives count when they are posted, which without a sender goes on only until the ring is full.
  std::uint64_t peer_progress() const override { return groups_arrived_; }
  LatencyStats latencies() const override { return latencies_ != nullptr ? latencies_->read() : LatencyStats{}; }
  Activity take_activity() override { return {.send_refused = false, .tested = tested_.take()}; }
  CompletedCounts completed_counts() const override;
  bool all_done() const override { return !waits_for_peer() && flush_.all_done(); }
  bool waits_for_peer() const override;
  bool advance_for_idle() noexcept override;
  void stop_monitor_acting() noexcept override;

 private:
  friend class CommProgress<RecvComm>;

  // Receives are posted this many at a time.
  static constexpr std::uint32_t kReceiveBatch = 16;

  // The immediate that has the number of parts has not arrived.
  static constexpr std::uint8_t kUnknownParts = 0xff;
  static_assert(kUnknownParts > wire::kMaxQps);

  struct RecvRequest : Request {
    std::uint8_t group_size = 0;
    wire::SizeSource sizes = wire::SizeSource::kPosted;
    bool optional_completion = false;
    std::uint8_t parts = kUnknownParts;
    std::uint16_t parts_seen = 0;
    std::uint32_t first_member = 0;
    std::uint64_t bytes_counted = 0;
  };

  // A call that changes the comm, from before it reads the slow path flags until it returns.
  class Call {
   public:
    explicit Call(RecvComm& comm) : in_call_(comm.in_call_) {}
    ~Call() { in_call_.publish(false); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    SingleWriter<bool>& in_call_;
  };

  struct RecvQueue {
    ibv_qp* qp = nullptr;
    std::uint32_t posted = 0;                  // receive work requests, counted in whole batches
    std::uint32_t until_post = kReceiveBatch;  // immediates until the next batch is posted
    std::uint32_t batches = 0;                 // that have been used up
    std::uint32_t flushed = 0;                 // receives of a lane that is down
    bool down = false;                         // nothing is posted any more
    bool probing = false;                      // a probe is outstanding
    // Receives that have not completed with an immediate.
    std::uint32_t outstanding() const { return posted - (kReceiveBatch - until_post); }
    std::uint32_t arrived() const { return batches * kReceiveBatch + (kReceiveBatch - until_post); }
  };

  const void* peer_written_memory() const override { return &record(); }
  std::uint32_t capabilities() const override { return arrivals_ != nullptr ? wire::kAtomicCompletion : 0U; }
  bool uses_for_flush(const ibv_qp& qp) const override { return flush_.uses(qp); }

  RecvComm(const CommSettings& settings, Endpoint endpoint, ControlMemory control, bool atomic);

  // After the group is counted as posted, also for the monitor, which reads the counters in the other order:
  // all_arrived().
  void count_arrival() {
    std::atomic_thread_fence(std::memory_order_release);
    ++groups_arrived_;
  }
  std::byte* entry(std::uint32_t index) const { return control_.data() + index * entry_bytes_; }
  wire::CompletionRecord& record() const {
    return *reinterpret_cast<wire::CompletionRecord*>(control_.data() + entry_bytes_ * wire::kRingEntries);
  }
  // The arrival word of a group. Acquire: data that was written before it is read after it.
  std::uint64_t arrival(const RecvRequest& request) const {
    return __atomic_load_n(&arrivals_[wire::ring_index(request.first_member)], __ATOMIC_ACQUIRE);
  }
  Failure flush_failure(const Error& error, std::size_t port) const;
  // The last bytes of the control memory.
  const std::byte* flush_target() const {
    return control_.data() + entry_bytes_ * wire::kRingEntries + wire::completion_record_bytes(arrivals_ != nullptr);
  }
  bool has_no_requests() const;
  void begin_call() noexcept {
    in_call_ = true;
    std::atomic_signal_fence(std::memory_order_seq_cst);  // fence_all_threads() does the rest
  }
  // The comm is the monitor's for now: no call may change it.
  bool monitor_acts() const noexcept { return (failure_state_.acquire_flags() & kMonitorActs) != 0; }
  void wait_for_monitor() const noexcept;
  bool prepare_flushes();
  ErrorKind reject_group_size(int n) const noexcept;
  ErrorKind reject_buffer() noexcept;
  void fail_unexpected_immediate(std::size_t queue);
  ErrorKind fail_size_mismatch(std::uint64_t bytes, std::uint64_t posted) noexcept;
  ErrorKind fail_byte_count(std::uint32_t group_size) noexcept;
  void fail_receive(const ibv_wc& completion);
  FailedWork outstanding_work(const ibv_wc& completion) const;
  bool update_allowance(std::uint32_t group_size);
  std::uint32_t consumed_members() const;
  void release_entries();
  template <bool kTimed>
  ErrorKind receive(int n, void* const* data, const std::size_t* sizes, const int* tags, void* const* handles,
                    void** out) noexcept;
  ErrorKind irecv_profiled(int n, void* const* data, const std::size_t* sizes, const int* tags, void* const* handles,
                           void* const* profiler_handles, void** out) noexcept;
  template <bool kTimed>
  ErrorKind receive_single(void* data, std::uint64_t bytes, int tag, const MemoryKeys& memory, void** out) noexcept;
  template <bool kTimed>
  ErrorKind receive_group(int n, void* const* data, const std::size_t* sizes, const int* tags, void* const* handles,
                          void** out) noexcept;
  template <bool kTimed>
  void post_group(const std::byte* entry_address, std::uint32_t group_size, bool optional_completion, void** out);
  // CTS work requests that their QP still accepts.
  std::uint32_t cts_free() const { return cts_depth_ - static_cast<std::uint32_t>(groups_posted_ - cts_sent_); }
  Status post_first_receives();
  void post_receives(std::size_t queue);
  void post_fence_receive(std::size_t queue);
  bool complete_simple(const ibv_wc& completion);
  void complete(const ibv_wc& completion);
  void resume_pending_post() {}
  bool post_probe(std::size_t qp, int& returned) noexcept override;
  bool carries_cts(std::size_t qp) const override { return qp == cts_queue_; }
  void process_immediate(const ibv_wc& completion, std::size_t queue);

  // ---- a lane that fails: recv_comm_failover.cc
  void stop_lane(std::size_t lane) override;
  void stop_port(std::size_t port) noexcept override { flush_.leave_out(port, *endpoint_.ports()[port]->device); }
  bool flush_failed(const ibv_wc& completion, std::size_t port, const FailedWork& work) noexcept;
  bool lane_drained(std::size_t lane) const override;
  wire::LaneReport lane_report(std::size_t lane) override;
  wire::LaneReport message_report(std::size_t lane);
  // Whether what is missing is posted again as whole messages (failover.h).
  bool replays_messages() const { return arrivals_ != nullptr || !can_lose_lanes(); }
  bool has_arrived(const RecvRequest& request) const {
    return request.state != RequestState::kPending ||
           (arrivals_ != nullptr && arrival(request) >> wire::kArrivalShift >= wire::kArrivalComplete);
  }
  void recover_lane(std::size_t lane, const std::optional<wire::LaneReport>& peer) override;
  bool recovered() override { return !ring_rewritten_; }
  void finish_recovery() override {}
  void adopt_lane(std::size_t lane) override;
  bool restore_flush_qp(std::size_t port, UniqueQp& qp) override {
    return !flush_.is_left_out(port) || flush_.restore(port, qp);
  }
  void use_lane(std::size_t lane) override;
  bool needs_flush_qp(std::size_t port) const override { return flush_.prepared() && flush_.is_left_out(port); }
  void late_bytes_have_come() noexcept override { flush_.complete_held(); }
  std::optional<std::uint32_t> all_arrived() const override;
  void use_cts_queue(std::size_t queue);
  void rewrite_ring();
  bool rewrite_ring_without(LaneNotices::Lanes lanes) noexcept override;
  int write_ring(std::size_t queue, std::uint64_t work) const noexcept;
  void finish(RecvRequest& request, wire::SizeSource sizes);
  template <bool kTimed>
  static ErrorKind test_arrival(RecvRequest& request, int* done, int* sizes) noexcept;
  template <bool kTimed>
  static ErrorKind retire(RecvRequest& request, int* done, int* sizes) noexcept;
  static ErrorKind retire_group(RecvRequest& request, int* sizes) noexcept;
  ErrorKind retire_too_long(RecvRequest& request, std::uint64_t posted) noexcept;
  static ErrorKind report_group_sizes(const RecvRequest& request, int* sizes) noexcept;

  const std::size_t entry_bytes_;
  const bool wide_entries_;  // of more than two devices
  const std::uint32_t max_recvs_;
  SingleWriter<std::uint32_t> next_member_;
  std::uint32_t oldest_member_ = 0;    // first member of the oldest group that occupies ring entries
  std::uint32_t members_allowed_ = 0;  // that may be posted before update_allowance() computes anew
  SingleWriter<std::uint64_t> groups_posted_;
  SingleWriter<std::uint64_t> groups_arrived_;  // optional ones count when posted
  std::uint64_t cts_sent_ = 0;                  // CTS that are known to have been sent
  bool cts_arrived_ = false;                    // the peer has begun a message, and said so
  std::uint32_t cts_depth_ = 0;                 // that their QP accepts
  std::uint32_t cts_signal_mask_ = 0;           // those whose number has none of these bits are signalled
  std::uint32_t empty_tests_ = 0;
  TransferCounts counts_;  // without messages, which follow from groups, and bytes
  SingleWriter<std::uint64_t> bytes_;
  SingleWriter<bool> optional_posted_;  // ever
  std::uint64_t* arrivals_ = nullptr;   // arrival words, nullptr with immediates
  std::uint64_t ring_offset_ = 0;       // from the local copy of the CTS ring to the sender's
  std::uint32_t cts_inline_bytes_ = 0;
  std::uint32_t receive_target_ = 0;                                 // receive work requests to keep posted on every QP
  std::uint32_t max_receives_ = wire::kMaxInFlight + kReceiveBatch;  // that every QP can hold
  ibv_qp* cts_qp_ = nullptr;                                         // the fastest,
  SingleWriter<std::size_t> cts_queue_;                              // and its index
  bool ring_rewritten_ = false;                                      // the WRITE is outstanding
  ibv_send_wr cts_work_ = {};
  ibv_sge cts_segment_ = {};
  std::vector<RecvQueue> queues_;
  std::array<ibv_recv_wr, kReceiveBatch> receive_chain_ = {};  // formatted once, posted with one doorbell
  std::array<RecvRequest, wire::kMaxInFlight> requests_;
  // Bytes of the buffers by ring entry: the peer may overwrite the entries themselves.
  std::array<std::uint64_t, wire::kRingEntries> posted_;
  FlushQueue flush_;
  bool observed_ = false;
  SingleWriter<bool> in_call_;
  std::unique_ptr<ReceiveLatencies> latencies_;  // nullptr: not measured
};

extern template class CommProgress<RecvComm>;

// wr_id: bits 0-15 queue, 16-31 the kind of work. Flushes have kFlushWorkBit.
constexpr std::uint64_t kReceiveWork = std::uint64_t{1} << 16;
constexpr std::uint64_t kCtsWork = std::uint64_t{2} << 16;
constexpr std::uint64_t kReceiverProbe = std::uint64_t{4} << 16;
constexpr std::uint64_t kRingWork = std::uint64_t{8} << 16;          // the whole CTS ring
constexpr std::uint64_t kMonitorRingWork = std::uint64_t{16} << 16;  // the same, posted by the monitor
constexpr std::uint64_t kFenceWork = std::uint64_t{32} << 16;        // RecvComm::post_fence_receive

}  // namespace verbatim
