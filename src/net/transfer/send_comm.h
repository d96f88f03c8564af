// The sending end of a connection. The receiver writes CTS entries into the ring of the sender; isend assigns its
// message to the first member of the group at the head of the ring that has the same tag. When every member has its
// message, the data is posted as RDMA WRITEs, followed by a completion signal for the receiver (wire/completion.h).
//
// send_comm.cc has the set-up and the common case, one doorbell on one QP; send_comm_striping.cc groups that are
// striped, cut, or wait for free send queue entries; send_comm_completions.cc test and completions;
// send_comm_failover.cc what is posted again when a lane fails.
#pragma once

#include <arpa/inet.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "net/transfer/comm_progress.h"
#include "net/transfer/lanes.h"
#include "net/transfer/latencies.h"
#include "wire/completion.h"
#include "wire/cts.h"

namespace verbatim {

class SendComm final : public CommProgress<SendComm> {
 public:
  // The endpoint that a send comm needs: `devices` of the end that has more, and so many QPs for each.
  static EndpointSizes endpoint_sizes(std::size_t devices, std::size_t qps_per_device, const Config& config);

  // Bytes of the control memory. `remote_devices`: of the listening side.
  static std::size_t control_bytes(std::size_t remote_devices);

  // `remote_devices` determines the layout of the ring.
  static Result<std::unique_ptr<SendComm>> create(const CommSettings& settings, Endpoint endpoint,
                                                  std::size_t remote_devices);

  // `remote` says whether atomics signal arrivals.
  Result<bool> connect(const wire::Hello& remote, int traffic_class, VerbBudget& budget) override;

  // Sends `bytes` at `data` to the next receive with `tag`. `*request` becomes nullptr when there is no such receive
  // yet: call again. `memory` may be nullptr for zero bytes, `profiler_handle` for none.
  ErrorKind isend(const void* data, std::size_t bytes, int tag, const MemoryKeys* memory, void* profiler_handle,
                  void** request) noexcept {
    return isend_(*this, data, bytes, tag, memory, profiler_handle, request);
  }

  // Whether `request` is done; if so it is free again and `*sizes` (which may be nullptr) has its bytes.
  static ErrorKind test(Request& request, int* done, int* sizes) noexcept;
  // The same for requests of the kinds kTimedSend and kProfiledSend.
  static ErrorKind test_timed(Request& request, int* done, int* sizes) noexcept;
  static ErrorKind test_profiled(Request& request, int* done, int* sizes) noexcept;

  TransferCounts transfer_counts() const override {
    return {.messages = head_, .bytes = bytes_, .groups = {}, .optional = 0};
  }
  CompletedCounts completed_counts() const override;
  bool all_done() const override;
  // An outstanding send needs only its acknowledgement.
  bool waits_for_peer() const override { return false; }

  wire::ConnectionStatus status() const override;
  std::optional<std::size_t> busiest_qp() const override;
  // Each message needs CTS entries of the peer.
  std::uint64_t peer_progress() const override { return head_; }
  LatencyStats latencies() const override { return latencies_ != nullptr ? latencies_->read() : LatencyStats{}; }
  Activity take_activity() override { return {.send_refused = send_refused_.take(), .tested = tested_.take()}; }

 private:
  friend class CommProgress<SendComm>;

  struct SendRequest : Request {
    // Of the group's first member.
    std::uint8_t group_size = 0;        // of the last group here that was not sent by send_single
    std::uint8_t parts_left = 0;        // QPs that have not finished; 0 also while send_single's message is pending
    std::uint32_t optional_member = 0;  // of the last group here that had optional completion: its number
    std::uint64_t bytes = 0;
    const void* data = nullptr;
    const MemoryKeys* memory = nullptr;  // of `data`
  };

  // A work request with its segment, formatted once. Between doorbells all are linked WRITEs of one segment.
  struct Work {
    ibv_send_wr request = {};
    ibv_sge segment = {};
    const MemoryKeys* memory = nullptr;  // of the head group's member
  };

  // The data of a member.
  struct Source {
    std::uint64_t data;
    const MemoryKeys* memory;
  };

  // What the data path needs of a QP, in one place.
  struct SendQueue {
    ibv_qp* qp = nullptr;
    SingleWriter<std::uint32_t> free;  // work requests that it still accepts
    std::uint32_t record_rkey = 0;     // of the peer's completion record
    std::uint32_t inline_bytes = 0;
    std::uint8_t device = 0;
    std::uint8_t remote_device = 0;
    std::uint8_t index = 0;
    std::uint64_t single_wr_id = 0;  // of a single message, without its ring index
  };

  // A QP's turn at the messages that are not striped.
  struct Turn {
    SendQueue* queue;
    const Turn* next;
  };

  // The head group, once all of its CTS entries have arrived. The WRITE of each member is formatted when isend is
  // called for it, for the usual case that the whole group is posted on one QP with one work request for each member.
  struct HeadGroup {
    std::uint32_t open_members = 0;  // bit i: member i has no message yet; 0: no group is loaded
    bool out_of_order = false;       // isend is called in another order than that of the members
    bool empty = false;              // some members have zero bytes
    bool optional_completion = false;
    std::uint8_t device = 0;                   // of the QP that will carry the group
    const std::byte* entry_address = nullptr;  // the lowest open member's CTS entry,
    SendRequest* request = nullptr;            // request
    Work* work = nullptr;                      // and work request
    std::uint64_t bytes = 0;                   // of the messages so far,
    std::uint64_t buffer_bytes = 0;            // and of the buffers for them
    std::size_t key_offset = 0;                // from an entry to the key for the QP
    std::uint64_t wr_id = 0;                   // of work requests without a completion, unless they fail
    std::uint32_t group_size = 0;
    std::uint32_t index = 0;  // ring index of the first member
  };

  // A group that needs stripes, pieces, or more free work requests than its QP has. It is posted as entries become
  // free; there is at most one such group.
  struct PendingPost {
    bool active = false;
    bool optional_completion = false;
    bool writes_size_record = false;  // with the first part
    std::uint32_t first_member = 0;   // number of the group's first member
    std::uint32_t group_size = 0;
    std::uint32_t parts = 1;
    const Stripe* stripes = nullptr;  // of the parts from first_part to before end_part: those that are posted
    Stripe whole;                     // the stripe of a group that is not striped, or of a part that is posted again
    std::uint32_t first_part = 0;
    std::uint32_t end_part = 1;
    std::uint32_t skipped_members = 0;  // bit i: member i is not written
    std::uint32_t queue = 0;            // of the current part, once it has begun
    bool part_begun = false;
    std::uint32_t part = 0;  // posted so far: part, member, bytes of the member's stripe
    std::uint32_t member = 0;
    std::uint64_t stripe_done = 0;
    std::uint64_t part_bytes = 0;
    bool record_written = false;  // the sizes have been formatted
    std::array<Source, wire::kMaxGroup> sources;
  };

  // Follows the CTS ring in the control memory: sources of what is written to the receiver.
  struct WriteSources {
    std::uint64_t size[wire::kRingEntries];
    std::uint64_t consumed;
    std::uint64_t atomic_result;  // target for the old values of arrival words; not used
  };

  // Work requests posted with one doorbell: a group, a size record and an atomic.
  static constexpr std::uint32_t kBatch = wire::kMaxGroup + 2;

  const void* peer_written_memory() const override { return control_.data(); }
  std::uint32_t capabilities() const override;

  SendComm(const CommSettings& settings, Endpoint endpoint, ControlMemory control, std::size_t remote_devices);

  const wire::CtsEntry& entry(std::uint32_t index) const {
    return *reinterpret_cast<const wire::CtsEntry*>(control_.data() + index * entry_bytes_);
  }
  bool ready(const std::byte* entry, std::uint32_t member) const {
    const auto* word = reinterpret_cast<const std::uint32_t*>(entry + ready_offset_);
    // Acquire, against the device's write of the entry: the fields before `ready` are read after it.
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) == member + 1;
  }
  std::uint32_t remote_key(std::uint32_t index, std::size_t remote_device) const;
  WriteSources& write_sources() const {
    return *reinterpret_cast<WriteSources*>(control_.data() + entry_bytes_ * wire::kRingEntries);
  }

  // What isend calls: without or with latencies, or with events of NCCL's profiler. A pointer costs the first no
  // branch.
  using Isend = ErrorKind (*)(SendComm& comm, const void* data, std::size_t bytes, int tag, const MemoryKeys* memory,
                              void* profiler_handle, void** request) noexcept;
  template <bool kTimed>
  static ErrorKind isend_plain(SendComm& comm, const void* data, std::size_t bytes, int tag, const MemoryKeys* memory,
                               void* profiler_handle, void** request) noexcept;
  static ErrorKind isend_profiled(SendComm& comm, const void* data, std::size_t bytes, int tag,
                                  const MemoryKeys* memory, void* profiler_handle, void** request) noexcept;
  template <bool kTimed>
  ErrorKind send_to_head(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                         void** request) noexcept;
  enum class Signal : std::uint8_t {
    kWithData,  // the WRITE of the data has the immediate
    kEmpty,     // a WRITE of its own, of a message that fills its buffer
    kWithTail,  // a WRITE of its own, which carries the last bytes of the data
  };
  template <Signal kSignal, bool kTimed>
  ErrorKind send_single(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory, void** out) noexcept;
  ErrorKind send_group_timed(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                             void** request) noexcept;
  ErrorKind begin_group(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                        void** request) noexcept;
  ErrorKind send_member(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                        void** request) noexcept;
  ErrorKind send_out_of_order(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                              void** request) noexcept;
  ErrorKind add_member(std::uint32_t still_open, const void* data, std::size_t bytes, const MemoryKeys& memory,
                       void** out) noexcept;
  void select_member(std::uint32_t member);
  bool load_head_group(std::uint32_t index);
  void set_head(std::uint64_t member) {
    head_ = member;
    head_entry_ = control_.data() + wire::ring_index(static_cast<std::uint32_t>(member)) * entry_bytes_;
  }
  std::uint32_t head() const { return static_cast<std::uint32_t>(head_); }
  ErrorKind post_group() noexcept;
  std::uint32_t append_completion(SendQueue& queue, std::uint32_t count, std::uint32_t member, bool full);
  void post(SendQueue& queue, std::uint32_t count, std::uint64_t wr_id);

  // The work requests that can close a part of a group; `work_[at]` takes each.
  void format_size_record(std::uint32_t at, const SendQueue& queue, std::uint32_t index, std::uint32_t group_size);
  void append_size_record(std::uint32_t at, const SendQueue& queue);
  void format_tail(std::uint32_t at, std::uint32_t bytes);
  void format_empty_write(std::uint32_t at, const SendQueue& queue);
  void format_consumed_write(std::uint32_t at, const SendQueue& queue);
  void format_arrival_atomic(std::uint32_t at, const SendQueue& queue, std::uint32_t index, std::uint64_t addend);
  void set_immediate(std::uint32_t at, const wire::Immediate& immediate);
  // Links the signal of a single message behind separate_data_, whose segment and target are set. It takes the last
  // `tail` bytes from them.
  void link_signal(const SendQueue& queue, std::uint64_t wr_id, std::uint32_t immediate_bits, std::uint32_t tail) {
    ibv_send_wr* signal = &empty_signal_;
    signal->wr.rdma.rkey = queue.record_rkey;
    if (tail != 0) [[unlikely]]
      signal = &format_tail_signal(tail);
    signal->wr_id = wr_id;
    signal->imm_data = htonl(immediate_bits);
    separate_data_.num_sge = single_segment_.length != 0 ? 1 : 0;
    separate_data_.next = signal;
  }
  ibv_send_wr& format_tail_signal(std::uint32_t bytes);
  // Gives the immediate the size of a single message that is shorter than its buffer, in units of that. Returns the
  // number of bytes that the signal must carry.
  static std::uint32_t set_units(wire::Immediate& immediate, std::uint64_t bytes, std::uint64_t buffer_bytes) {
    const unsigned shift = wire::unit_shift(buffer_bytes);
    // The limit counts if the peer has changed the size of the buffer meanwhile.
    const std::uint64_t units = std::min<std::uint64_t>(bytes >> shift, wire::kUnitMask);
    immediate.sizes = wire::SizeSource::kByteCount;
    immediate.units = static_cast<std::uint32_t>(units);
    return static_cast<std::uint32_t>(bytes - (units << shift));
  }

  void store_sizes(std::uint32_t index, std::uint32_t group_size) const;
  bool separates_completion(std::uint64_t bytes) const {
    return adaptive_routing_ && bytes > adaptive_routing_threshold_;
  }
  // Whether to report the used CTS entries to the receiver with this optional group: once in so many.
  bool reports_consumed();
  bool can_send();
  bool post_probe(std::size_t qp, int& returned) noexcept override;
  bool fail_invalid_cts();
  ErrorKind fail_size_mismatch(std::size_t bytes, const wire::CtsEntry& entry_head) noexcept;
  ErrorKind no_matching_receive() noexcept;
  void fail_send(const ibv_wc& completion);
  static RefusedBuffer refused_buffer(const SendRequest* first, std::uint32_t members, const Device& device);
  template <bool kTimed>
  static ErrorKind retire(SendRequest& request, int* done, int* sizes) noexcept;
  bool complete_simple(const ibv_wc& completion);
  void complete(const ibv_wc& completion);
  void resume_pending_post() {
    if (pending_post_.active && error() == nullptr) continue_pending_post();
    if (!missing_.empty()) post_missing_parts();
    if (shares_changed_) update_shares();
  }

  bool can_post_stripes() const;
  void post_stripes(std::uint32_t member);
  void start_pending_post(std::uint32_t first_member, std::uint32_t group_size, std::span<const Stripe> stripes = {});
  void continue_pending_post();
  bool next_piece(const SendQueue& queue, std::uint32_t at);
  bool next_completion_work(const SendQueue& queue, std::uint32_t at);
  const Stripe& current_stripe() const { return pending_post_.stripes[pending_post_.part - pending_post_.first_part]; }

  // ---- a lane that fails: send_comm_failover.cc
  struct MissingPart {
    SentPart part;
    bool immediate;
  };
  void stop_lane(std::size_t lane) override;
  bool lane_drained(std::size_t lane) const override;
  wire::LaneReport lane_report(std::size_t lane) override;
  // Whether what is missing is posted again as whole messages (failover.h).
  bool replays_messages() const { return atomic_ || !can_lose_lanes(); }
  bool drains_all(std::size_t lane) const { return replays_messages() && failover_->lane(lane).used; }
  bool cts_arrived(std::uint32_t members) const;
  void recover_lane(std::size_t lane, const std::optional<wire::LaneReport>& peer) override;
  bool recovered() override;
  void finish_recovery() override;
  void adopt_lane(std::size_t lane) override;
  void use_lane(std::size_t lane) override;
  void update_shares() noexcept;
  LaneProgress lane_progress(std::size_t lane) const override;
  void recover_messages(const std::optional<wire::LaneReport>& peer);
  std::uint32_t open_window_begin() const;
  bool is_written_again(std::uint32_t member) const;
  std::uint32_t first_that_may_be_missing(const std::optional<wire::LaneReport>& peer) const;
  // Of the group that begins with this pending request. Not that of its CTS entries, which the peer may change.
  static std::uint8_t sent_group_size(const SendRequest& first) {
    return first.parts_left != 0 ? first.group_size : std::uint8_t{1};
  }
  void finish_members(std::uint32_t index);
  bool queue_drained(std::size_t queue) const;
  void set_turns();
  // A part of the group with this first request.
  static void part_finished(SendRequest& first) {
    SendRequest* member = &first;
    if (--member->parts_left != 0) return;
    const SendRequest* const end = member + member->group_size;
    do {
      member->state = RequestState::kDone;
    } while (++member != end);
  }
  // ---- events of NCCL's profiler: profiled_calls.cc
  void stop_completed_parts() noexcept;
  void start_events(std::uint32_t first, std::uint32_t members, const ProfilerEvents::PostedPart& part) noexcept;
  void start_noted() noexcept;
  void start_posted(std::uint64_t first, const SendQueue& queue) noexcept;
  void post_missing_parts();
  void post_again(const MissingPart& missing);
  std::optional<std::uint32_t> overwritten_members(std::uint32_t first_member, std::uint32_t group_size) const;
  // Members are numbered modulo 2^32. The last one that was sent from this ring index.
  std::uint32_t member_at(std::uint32_t index) const {
    const std::uint32_t last = head() - 1;
    return last - ((last - index) & wire::kRingMask);
  }
  void log_part(std::size_t queue, const SentPart& part, bool immediate) {
    if (!logs_.empty()) logs_[queue].add(part, immediate);
  }

  const std::size_t entry_bytes_;
  const std::size_t ready_offset_;
  Isend isend_ = isend_plain<false>;
  std::unique_ptr<SendLatencies> latencies_;  // nullptr: not measured
  const std::byte* head_entry_ = nullptr;     // the head group's first CTS entry
  SingleWriter<std::uint64_t> head_;          // its number, which is also the number of messages sent
  std::vector<Turn> turns_;                   // a ring, see qp_turns
  const Turn* turn_ = nullptr;                // of the next message that is not striped
  SingleWriter<std::uint64_t> bytes_;
  SingleWriter<bool> send_refused_;         // an isend found no receive
  std::uint64_t single_limit_bytes_ = 0;    // single messages below this take one work request
  std::uint64_t separate_limit_bytes_ = 0;  // single messages from that limit to below this take two
  HeadGroup group_;
  std::uint32_t queue_count_ = 0;
  std::uint32_t max_piece_bytes_ = 0;
  std::uint32_t unreported_optional_groups_ = 0;  // since the last report of used CTS entries
  bool atomic_ = false;
  bool adaptive_routing_ = false;
  std::uint64_t adaptive_routing_threshold_ = 0;
  std::uint64_t stripe_threshold_ = 0;    // groups of at least this many bytes go over all QPs
  std::uint64_t simple_limit_bytes_ = 0;  // smaller ones go over one QP, one work request for each member
  std::uint64_t record_address_ = 0;      // the peer's completion record
  std::vector<SendQueue> queues_;
  Striping striping_;
  PendingPost pending_post_;
  std::vector<LaneLog> logs_;                     // of the QPs; empty with one lane, only counts with atomics
  std::vector<MissingPart> missing_;              // to be posted again, the next one last
  bool fencing_ = false;                          // a lane is not fenced at both ends: nothing is posted
  bool shares_changed_ = false;                   // striping_ does not have the working_shares() yet
  std::optional<std::uint32_t> awaited_members_;  // receives whose CTS entries must arrive before
  // Work requests of a single message, formatted once: the data with an immediate, or the data and a signal.
  ibv_send_wr single_ = {};
  ibv_send_wr separate_data_ = {};
  ibv_send_wr empty_signal_ = {};
  ibv_send_wr tail_signal_ = {};
  ibv_sge single_segment_ = {};
  ibv_sge tail_segment_ = {};
  std::array<Work, kBatch> work_;
  std::array<SendRequest, wire::kRingEntries> requests_;
};

extern template class CommProgress<SendComm>;

// wr_id of a signalled work request: bits 0-15 ring index of the group, 16-31 queue, 32 whether it completes its part
// of the group, 33 whether it completes a single message in one part, 34 whether it is a probe of the peer's NIC, 35-47
// encode_load of its bytes if they belong to a striped message or a pending post, 48-63 work requests that complete
// with it.
constexpr unsigned kSendCountShift = 48;
constexpr std::uint64_t kSendPartDone = std::uint64_t{1} << 32;
constexpr std::uint64_t kSendSingle = std::uint64_t{1} << 33;
constexpr std::uint64_t kSendProbe = std::uint64_t{1} << 34;
// In the place of the ring index: a WRITE that shows that a lane works.
constexpr std::uint32_t kSendPing = 0xffff;
constexpr unsigned kSendLoadShift = 35;
constexpr std::uint32_t kSendLoadMask = (1U << kLoadBits) - 1;
constexpr std::uint64_t encode_send_work(std::uint32_t index, std::uint32_t queue, std::uint32_t count,
                                         bool part_done) {
  return index | std::uint64_t{queue} << 16 | std::uint64_t{count} << kSendCountShift | (part_done ? kSendPartDone : 0);
}

}  // namespace verbatim
