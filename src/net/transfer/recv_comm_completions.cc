// The receiving end's completions: which receives have arrived, what test reports of them, and what has failed.
#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "base/thread_order.h"
#include "net/transfer/recv_comm.h"
#include "verbs/qp.h"

namespace verbatim {
namespace {

// With arrival words only failures and CTS come through the completion queue: tests poll it this rarely.
constexpr std::uint32_t kEmptyTestsPerPoll = 64;

constexpr unsigned kMonitorActsPollUs = 100;

}  // namespace

template class CommProgress<RecvComm>;

// An application that makes no calls would leave the comm as it is. Calls of irecv and iflush say that they run, and
// leave the comm alone while the flag is set; a test runs only for a request that is not free.
bool RecvComm::advance_for_idle() noexcept {
  if (in_call_.acquire() || !has_no_requests()) return false;
  failure_state_.set_flag(kMonitorActs);
  const bool idle = fence_all_threads() && !in_call_.acquire() && has_no_requests();
  if (idle) CommProgress::progress();
  failure_state_.clear_flag(kMonitorActs);
  return idle;
}

bool RecvComm::has_no_requests() const {
  const auto is_free = [](const RecvRequest& request) {
    auto& state = const_cast<RequestState&>(request.state);  // atomic_ref of a const object is C++26
    const RequestState now = std::atomic_ref(state).load(std::memory_order_acquire);
    return now == RequestState::kFree || now == RequestState::kDoneUnconfirmed;
  };
  return flush_.in_use() == 0 && std::all_of(requests_.begin(), requests_.end(), is_free);
}

void RecvComm::stop_monitor_acting() noexcept {
  in_call_ = true;
  wait_for_monitor();
}

// For calls that cannot be repeated. The monitor acts for some microseconds, when it asks a device whether its link is
// down for up to 50 ms.
void RecvComm::wait_for_monitor() const noexcept {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  while (monitor_acts()) ::usleep(kMonitorActsPollUs);
}

bool RecvComm::waits_for_peer() const {
  return !std::all_of(requests_.begin(), requests_.end(),
                      [&](const RecvRequest& request) { return has_arrived(request); });
}

// A group that arrived in one part, whose size has no units, after which no receives need to be posted. Not inlined, it
// would cost each message 4 instructions more.
[[gnu::always_inline]] inline bool RecvComm::complete_simple(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS || (completion.wr_id & kReceiveWork) == 0) return false;
  RecvQueue& queue = queues_[completion.wr_id & 0xffff];
  const std::uint32_t bits = ntohl(completion.imm_data);
  const wire::Immediate immediate = wire::decode_immediate(bits);
  RecvRequest& request = requests_[immediate.entry];
  if (queue.until_post == 1 || !wire::is_simple_immediate(bits) || request.parts_seen != 0 ||
      request.state != RequestState::kPending || immediate.pass != wire::ring_pass(request.first_member)) {
    return false;
  }
  --queue.until_post;
  request.bytes_counted = completion.byte_len;
  finish(request, immediate.sizes);
  return true;
}

inline void RecvComm::finish(RecvRequest& request, wire::SizeSource sizes) {
  request.sizes = sizes;
  request.change_state(RequestState::kDone);
  count_arrival();
}

void RecvComm::process_immediate(const ibv_wc& completion, std::size_t queue_index) {
  RecvQueue& queue = queues_[queue_index];
  if (--queue.until_post == 0) {
    queue.until_post = kReceiveBatch;
    queue.posted -= kReceiveBatch;
    ++queue.batches;
    post_receives(queue_index);
  }
  const wire::Immediate immediate = wire::decode_immediate(ntohl(completion.imm_data));
  RecvRequest& request = requests_[immediate.entry];
  if (request.state != RequestState::kPending || immediate.pass != wire::ring_pass(request.first_member)) {
    return fail_unexpected_immediate(queue_index);
  }
  if (request.parts_seen == 0) {
    request.sizes = wire::SizeSource::kPosted;
    request.parts = kUnknownParts;
  } else if (immediate.parts == 1) {
    return fail_unexpected_immediate(queue_index);
  }
  if (immediate.sizes == wire::SizeSource::kByteCount) {
    if (request.sizes != wire::SizeSource::kPosted) return fail_unexpected_immediate(queue_index);  // a second size
    const std::uint64_t posted = posted_[immediate.entry];
    request.bytes_counted = wire::bytes_of_units(immediate.units, posted) + completion.byte_len;
  }
  if (immediate.parts != 0) request.parts = static_cast<std::uint8_t>(immediate.parts);
  if (immediate.sizes != wire::SizeSource::kOtherPart) request.sizes = immediate.sizes;
  if (++request.parts_seen < request.parts) return;
  request.parts_seen = 0;
  finish(request, request.sizes);
}

void RecvComm::complete(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS) return fail_receive(completion);
  if ((completion.wr_id & kReceiveWork) != 0) return process_immediate(completion, completion.wr_id & 0xffff);
  if ((completion.wr_id & kFlushWorkBit) != 0) {
    return flush_.complete(completion.wr_id);
  }
  const bool cts_queue = (completion.wr_id & 0xffff) == cts_queue_;  // not that of a lane which went down
  if ((completion.wr_id & kMonitorRingWork) != 0) return;
  if ((completion.wr_id & kFenceWork) != 0) return fail_unexpected_immediate(completion.wr_id & 0xffff);
  if ((completion.wr_id & kCtsWork) != 0) {
    if (cts_queue) cts_sent_ += cts_signal_mask_ + 1;
    return;
  }
  if (cts_queue) ++cts_depth_;
  if ((completion.wr_id & kRingWork) != 0) {
    if (cts_queue) ring_rewritten_ = false;
    return;
  }
  queues_[completion.wr_id & 0xffff].probing = false;
  probe_answered();
}

// One QP shares its send queue with the CTS entries; the send queues of the others are not used.
bool RecvComm::post_probe(std::size_t qp, int& returned) noexcept {
  if (qp == cts_queue_) {
    if (cts_free() == 0) return false;
    --cts_depth_;
    members_allowed_ = 0;
  }
  queues_[qp].probing = true;
  const std::uint32_t rkey = endpoint_.remote().devices[endpoint_.qps()[qp].remote_device].control_rkey;
  returned = post_empty_write(queues_[qp].qp, kReceiverProbe | qp, control_.address() + ring_offset_, rkey);
  return true;
}

void RecvComm::fail_receive(const ibv_wc& completion) {
  if ((completion.wr_id & kFlushWorkBit) != 0) {
    const std::size_t port = flush_port(completion.wr_id);
    const FailedWork flush{.operation_text = "flushing a GPU buffer", .bytes = std::nullopt, .loopback = true};
    if (flush_failed(completion, port, flush)) return;
    return fail_completion(completion, endpoint_.qp_on_port(port), flush);
  }
  const std::size_t queue = completion.wr_id & 0xffff;
  const bool probe = (completion.wr_id & kReceiverProbe) != 0;
  if (is_of_earlier_qp(completion, queue)) return;
  if (lane_failed(completion, queue, [&] { return probe ? kProbeWork : outstanding_work(completion); })) {
    if ((completion.wr_id & (kReceiveWork | kFenceWork)) != 0) ++queues_[queue].flushed;
    if (probe) probe_dropped();
    return;
  }
  fail_completion(completion, queue, probe ? kProbeWork : outstanding_work(completion));
}

FailedWork RecvComm::outstanding_work(const ibv_wc& completion) const {
  std::uint64_t bytes = 0;  // of outstanding receives
  for (std::uint32_t member = oldest_member_; member != next_member_;) {
    const RecvRequest& request = requests_[wire::ring_index(member)];
    const std::uint64_t* const posted = &posted_[wire::ring_index(member)];
    if (request.state == RequestState::kPending) bytes = std::accumulate(posted, posted + request.group_size, bytes);
    member += request.group_size;
  }
  FailedWork work{.operation_text = "waiting for messages, with no receive outstanding,", .bytes = std::nullopt};
  const bool is_receive = (completion.wr_id & (kReceiveWork | kFenceWork)) != 0;
  if (!is_receive) work.operation_text = "announcing a receive (CTS)";
  if (bytes != 0) {
    work.bytes = bytes;
    work.operation_text = is_receive ? "receiving" : "announcing receive buffers (CTS) of";
  }
  return work;
}

void RecvComm::fail_unexpected_immediate(std::size_t queue) {
  fail(ErrorKind::kRemote, "immediate", queue, diagnose_corrupt_peer,
       [] { return std::string("the peer completed a receive that is not posted"); });
}

ErrorKind RecvComm::fail_size_mismatch(std::uint64_t bytes, std::uint64_t posted) noexcept {
  fail(ErrorKind::kRemote, "completion record", 0, diagnose_corrupt_peer, [&] {
    return "the peer reports " + std::to_string(bytes) + " bytes in a receive that holds " + std::to_string(posted);
  });
  return result();
}

// A byte count does not give the sizes of several members.
ErrorKind RecvComm::fail_byte_count(std::uint32_t group_size) noexcept {
  fail(ErrorKind::kRemote, "completion", 0, diagnose_corrupt_peer,
       [&] { return "the peer completed a group of " + std::to_string(group_size) + " receives as a single message"; });
  return result();
}

ErrorKind RecvComm::test(Request& base, int* done, int* sizes) noexcept {
  return test_request<false>(static_cast<RecvRequest&>(base), done, sizes);
}

ErrorKind RecvComm::test_atomic(Request& base, int* done, int* sizes) noexcept {
  return test_arrival<false>(static_cast<RecvRequest&>(base), done, sizes);
}

ErrorKind RecvComm::test_timed(Request& base, int* done, int* sizes) noexcept {
  return test_request<true>(static_cast<RecvRequest&>(base), done, sizes);
}

ErrorKind RecvComm::test_timed_atomic(Request& base, int* done, int* sizes) noexcept {
  return test_arrival<true>(static_cast<RecvRequest&>(base), done, sizes);
}

template <bool kTimed>
ErrorKind RecvComm::test_arrival(RecvRequest& request, int* done, int* sizes) noexcept {
  RecvComm& comm = *static_cast<RecvComm*>(request.comm);
  if (request.state != RequestState::kDone) {
    const std::uint64_t word = comm.arrival(request);
    if (word >> wire::kArrivalShift < wire::kArrivalComplete) {
      comm.tested_ = true;
      if (++comm.empty_tests_ % kEmptyTestsPerPoll == 0 || comm.slow_path_flags() != 0) comm.CommProgress::progress();
      *done = 0;
      return comm.result();
    }
    std::uint64_t posted = 0;
    const std::uint32_t index = wire::ring_index(request.first_member);
    for (std::uint32_t i = 0; i < request.group_size; ++i) posted += comm.posted_[index + i];
    request.bytes_counted = word & wire::kArrivalBytesMask;
    request.sizes = request.group_size == 1           ? wire::SizeSource::kByteCount
                    : request.bytes_counted == posted ? wire::SizeSource::kPosted
                                                      : wire::SizeSource::kRecord;
    request.change_state(RequestState::kDone);
    comm.count_arrival();
  }
  return retire<kTimed>(request, done, sizes);
}

// What has arrived is reported even if the comm has failed since; impossible sizes fail it.
template <bool kTimed>
[[gnu::noinline]] ErrorKind RecvComm::retire(RecvRequest& request, int* done, int* sizes) noexcept {
  *done = 1;
  RecvComm& comm = *static_cast<RecvComm*>(request.comm);
  if (!request.optional_completion) {
    if constexpr (kTimed) comm.latencies_->done(wire::ring_index(request.first_member));
    // NCCL tests receives in order: then this is all that release_entries() would do.
    if (request.first_member == comm.oldest_member_) [[likely]]
      comm.oldest_member_ += request.group_size;
  }
  if (request.group_size != 1 || request.sizes != wire::SizeSource::kByteCount) return retire_group(request, sizes);
  const std::uint64_t posted = comm.posted_[wire::ring_index(request.first_member)];
  if (request.bytes_counted > posted) return comm.retire_too_long(request, posted);
  comm.bytes_ += request.bytes_counted;
  if (sizes != nullptr) *sizes = narrow(request.bytes_counted);
  request.change_state(RequestState::kFree);
  return ErrorKind::kNone;
}

[[gnu::noinline]] ErrorKind RecvComm::retire_too_long(RecvRequest& request, std::uint64_t posted) noexcept {
  const ErrorKind result = fail_size_mismatch(request.bytes_counted, posted);
  request.change_state(RequestState::kFree);
  return result;
}

[[gnu::noinline]] ErrorKind RecvComm::retire_group(RecvRequest& request, int* sizes) noexcept {
  if (request.group_size == 1 && request.sizes == wire::SizeSource::kPosted && !request.optional_completion) {
    RecvComm& comm = *static_cast<RecvComm*>(request.comm);
    const std::uint64_t posted = comm.posted_[wire::ring_index(request.first_member)];
    comm.bytes_ += posted;
    if (sizes != nullptr) *sizes = narrow(posted);
    request.change_state(RequestState::kFree);
    return ErrorKind::kNone;
  }
  const ErrorKind result = report_group_sizes(request, sizes);
  request.change_state(request.optional_completion ? RequestState::kDoneUnconfirmed : RequestState::kFree);
  return result;
}

ErrorKind RecvComm::report_group_sizes(const RecvRequest& request, int* sizes) noexcept {
  RecvComm& comm = *static_cast<RecvComm*>(request.comm);
  const std::uint32_t index = wire::ring_index(request.first_member);
  const std::uint64_t* const posted = &comm.posted_[index];
  const std::uint32_t group_size = request.group_size;
  if (request.sizes == wire::SizeSource::kByteCount) return comm.fail_byte_count(group_size);
  int ignored_sizes[wire::kMaxGroup];
  if (sizes == nullptr) sizes = ignored_sizes;
  std::uint64_t bytes = 0;
  if (request.sizes == wire::SizeSource::kRecord) {
    const std::uint64_t* const recorded_sizes = &comm.record().size[index];
    for (std::uint32_t i = 0; i < group_size; ++i) {
      const std::uint64_t size =
          __atomic_load_n(&recorded_sizes[i], __ATOMIC_RELAXED);  // the peer may write it any time
      if (size > posted[i]) return comm.fail_size_mismatch(size, posted[i]);
      bytes += size;
      sizes[i] = narrow(size);
    }
  } else {  // the posted sizes
    for (std::uint32_t i = 0; i < group_size; ++i) {
      bytes += posted[i];
      sizes[i] = narrow(posted[i]);
    }
  }
  if (!request.optional_completion) comm.bytes_ += bytes;
  return ErrorKind::kNone;
}

wire::ConnectionStatus RecvComm::status() const {
  wire::ConnectionStatus status{.members = next_member_, .flushes = flush_.pending(), .bytes = bytes_};
  const std::uint64_t arrived = groups_arrived_;  // read first, so that it is never above `posted`
  std::atomic_thread_fence(std::memory_order_acquire);
  const std::uint64_t posted = groups_posted_;
  status.outstanding = static_cast<std::uint32_t>(posted - std::min(posted, arrived));
  if (optional_posted_) status.flags |= wire::ConnectionStatus::kOptionalReceives;
  return status;
}

CompletedCounts RecvComm::completed_counts() const {
  CompletedCounts completed_counts{transfer_counts().messages, bytes_, cts_sent_ != 0 || cts_arrived_};
  const std::uint32_t used = consumed_members();
  for (std::uint32_t member = oldest_member_; member != next_member_;) {
    const RecvRequest& request = requests_[wire::ring_index(member)];
    const bool unconfirmed = request.optional_completion && member - oldest_member_ >= used;
    if (unconfirmed || !has_arrived(request)) completed_counts.messages -= request.group_size;
    member += request.group_size;
  }
  completed_counts.peer_responded = completed_counts.peer_responded || completed_counts.messages != 0;
  return completed_counts;
}

TransferCounts RecvComm::transfer_counts() const {
  TransferCounts transfer_counts = counts_;
  transfer_counts.bytes = bytes_;
  for (std::size_t i = 0; i < transfer_counts.groups.size(); ++i)
    transfer_counts.messages += transfer_counts.groups[i] * (i + 1);
  return transfer_counts;
}

}  // namespace verbatim
