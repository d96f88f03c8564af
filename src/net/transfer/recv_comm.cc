#include "net/transfer/recv_comm.h"

#include <arpa/inet.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "net/transfer/lanes.h"
#include "verbs/qp.h"

namespace verbatim {
namespace {

constexpr std::uint32_t kCtsQueueDepth = 128;
// One in so many CTS is signalled, which frees the send queue; a quarter of the depth where the queue is shallow.
constexpr std::uint32_t kCtsSignalInterval = 32;
constexpr std::uint32_t kCtsInlineBytes = 2 * sizeof(wire::CtsEntry);

template <typename Entry>
void write_entry(Entry& entry, std::uint32_t member, void* data, std::uint64_t bytes, int tag, wire::CtsSize group,
                 const MemoryKeys& memory) {
  entry.address = reinterpret_cast<std::uint64_t>(data);
  entry.size = {bytes, group};
  entry.tag = static_cast<std::uint32_t>(tag);
  std::memcpy(entry.rkey, memory.rkey, sizeof entry.rkey);
  // The monitor may write the ring to the peer meanwhile (rewrite_ring_without).
  __atomic_store_n(&entry.ready, member + 1, __ATOMIC_RELEASE);
}

constexpr std::size_t kFlushTargetBytes = sizeof(std::uint64_t);

constexpr std::uint32_t kFirstReceiveTarget = 32;
// A receive for every group that can be in flight, and the batch that is being used up.
constexpr std::uint32_t kMaxReceiveTarget = wire::kMaxInFlight + 16;

// Why arrivals on `ports` cannot be signalled by atomics; nullptr when they can.
const char* why_no_atomics(std::span<const Port* const> ports, const wire::Hello& peer) {
  if ((peer.capabilities & wire::kAtomicCompletion) == 0) return "the peer does not offer it";
  for (const Port* port : ports) {
    if (port->device->attributes().atomic_cap == IBV_ATOMIC_NONE || responder_reads(*port->device) == 0) {
      return "the device has no atomics";
    }
  }
  // The atomics of all QPs go to one word.
  return atomics_exclude_each_other(ports) ? nullptr : "atomics of different devices are not coherent";
}

}  // namespace

EndpointSizes RecvComm::endpoint_sizes(const Config& config, std::span<const Port* const> ports,
                                       const wire::Hello& peer) {
  const bool atomic = config.completion == Completion::kAtomic && why_no_atomics(ports, peer) == nullptr;
  EndpointSizes sizes;
  sizes.qps = peer.qps.size();
  sizes.caps.send_wr = kCtsQueueDepth;
  sizes.caps.recv_wr = atomic ? 1 : kMaxReceiveTarget;  // not every device takes 0
  sizes.caps.inline_bytes = kCtsInlineBytes;
  sizes.extra_completions = FlushQueue::kSlots;
  return sizes;
}

std::size_t RecvComm::control_bytes(std::size_t devices, bool atomic) {
  return wire::cts_ring_bytes(devices) + wire::completion_record_bytes(atomic) + kFlushTargetBytes;
}

Result<std::unique_ptr<RecvComm>> RecvComm::create(const CommSettings& settings, Endpoint endpoint,
                                                   const wire::Hello& peer) {
  const std::span<const Port* const> ports = endpoint.ports();
  const bool atomic_wanted = settings.config.completion == Completion::kAtomic;
  const char* const refused = atomic_wanted ? why_no_atomics(ports, peer) : nullptr;
  const bool atomic = atomic_wanted && refused == nullptr;
  Result<ControlMemory> control = ControlMemory::create(ports, control_bytes(ports.size(), atomic),
                                                        atomic ? MrOrdering::kAtomic : MrOrdering::kStrict);
  if (!control) return control.error();
  std::unique_ptr<RecvComm> comm(new RecvComm(settings, std::move(endpoint), std::move(*control), atomic));
  comm->atomics_refused_ = refused;
  return comm;
}

RecvComm::RecvComm(const CommSettings& settings, Endpoint endpoint, ControlMemory control, bool atomic)
    : CommProgress(CommKind::kRecv, settings, std::move(endpoint), std::move(control)),
      entry_bytes_(wire::cts_entry_bytes(endpoint_.ports().size())),
      wide_entries_(entry_bytes_ != sizeof(wire::CtsEntry)),
      max_recvs_(settings.max_recvs) {
  static_assert(kMaxReceiveTarget >= wire::kMaxInFlight + kReceiveBatch && kMaxReceiveTarget % kReceiveBatch == 0);
  if (atomic) arrivals_ = record().arrival;
  for (std::size_t i = 0; i + 1 < receive_chain_.size(); ++i) receive_chain_[i].next = &receive_chain_[i + 1];
  for (RecvRequest& request : requests_) {
    request.comm = this;
    request.kind = atomic ? RequestKind::kRecvAtomic : RequestKind::kRecv;
  }
}

Result<bool> RecvComm::connect(const wire::Hello& remote, int traffic_class, VerbBudget& budget) {
  // Before RTR: from then on the sender may write.
  if (queues_.empty()) {
    if (const Status posted = post_first_receives(); !posted) return posted.error();
  }
  Config config = settings_.config;
  if (config.cts_traffic_class) config.traffic_class = config.cts_traffic_class;
  const Result<bool> connected = endpoint_.connect(remote, config, traffic_class, budget);
  if (!connected || !*connected) return connected;
  ring_offset_ = remote.control_address - control_.address();
  cts_work_.sg_list = &cts_segment_;
  cts_work_.num_sge = 1;
  cts_work_.opcode = IBV_WR_RDMA_WRITE;
  enable_failover();
  use_cts_queue(fastest_qp(working_shares()));
  if (settings_.config.latency) latencies_ = std::make_unique<ReceiveLatencies>();
  profiler_events_ = make_profiler_events();
  observed_ = latencies_ != nullptr || profiler_events_ != nullptr;
  if (observed_) {
    const bool profiled = profiler_events_ != nullptr;
    const RequestKind timed = arrivals_ != nullptr ? RequestKind::kTimedRecvAtomic : RequestKind::kTimedRecv;
    for (RecvRequest& request : requests_) request.kind = profiled ? RequestKind::kProfiledRecv : timed;
  }
  return true;
}

// CTS entries go over this QP from now on.
void RecvComm::use_cts_queue(std::size_t queue) {
  const EndpointQp& qp = endpoint_.qps()[queue];
  cts_queue_ = queue;
  cts_qp_ = qp.qp.get();
  cts_depth_ = qp.send_wr - (queues_[queue].probing ? 1 : 0) - (can_lose_lanes() ? 1 : 0);
  cts_inline_bytes_ = qp.inline_bytes;
  cts_signal_mask_ = std::bit_floor(std::clamp(qp.send_wr / 4, 1U, kCtsSignalInterval)) - 1;
  cts_sent_ = groups_posted_ & ~std::uint64_t{cts_signal_mask_};
  cts_work_.wr_id = kCtsWork | queue;
  cts_segment_.lkey = control_.lkey(qp.device);
  cts_work_.wr.rdma.rkey = endpoint_.remote().devices[qp.remote_device].control_rkey;
}

Status RecvComm::post_first_receives() {
  for (const EndpointQp& end : endpoint_.qps()) queues_.push_back({end.qp.get(), 0});
  for (const EndpointQp& end : endpoint_.qps()) max_receives_ = std::min(max_receives_, end.recv_wr);
  max_receives_ -= max_receives_ % kReceiveBatch;
  if (arrivals_ != nullptr) {
    for (std::size_t i = 0; i < queues_.size(); ++i) post_fence_receive(i);
  } else {
    if (max_receives_ == 0) return Error{ErrorKind::kUsage, 0, "a device with too few receives to a QP"};
    receive_target_ = std::min(kFirstReceiveTarget, max_receives_);
    for (std::size_t i = 0; i < queues_.size(); ++i) post_receives(i);
  }
  if (error() != nullptr) return *error();
  return {};
}

// Fills the QP up to the target, a batch at a time.
void RecvComm::post_receives(std::size_t queue_index) {
  RecvQueue& queue = queues_[queue_index];
  if (queue.down) return;
  while (queue.posted + kReceiveBatch <= receive_target_) {
    for (ibv_recv_wr& work : receive_chain_) work.wr_id = kReceiveWork | queue_index;
    ibv_recv_wr* refused = nullptr;
    const int returned = ibv_post_recv(queue.qp, receive_chain_.data(), &refused);
    if (returned != 0) return fail_post("ibv_post_recv", returned, queue_index);
    queue.posted += kReceiveBatch;
  }
}

// With arrival words nothing uses receives. When a lane fails, the completion of this one shows that the QP changes no
// memory any more.
void RecvComm::post_fence_receive(std::size_t queue_index) {
  RecvQueue& queue = queues_[queue_index];
  ibv_recv_wr work{};
  work.wr_id = kFenceWork | queue_index;
  ibv_recv_wr* refused = nullptr;
  const int returned = ibv_post_recv(queue.qp, &work, &refused);
  if (returned != 0) return fail_post("ibv_post_recv", returned, queue_index);
  queue.posted = 1;
}

// Computes how many members may be posted: the limits are requests, CTS work requests and receives on every QP. Returns
// whether a group of this size may.
bool RecvComm::update_allowance(std::uint32_t group_size) {
  // Optional receives are not tested: for them only this function polls and reads comm events.
  if (cts_free() == 0 || optional_posted_ || (slow_path_flags() & kCommEvents) != 0) CommProgress::progress();
  if (lanes_change()) CommProgress::progress();
  if (optional_posted_ || lanes_change()) check_events(true);
  if (error() != nullptr || lanes_change()) return false;
  constexpr std::uint32_t kReleaseThreshold = wire::kMaxInFlight / 2;
  if (next_member_ - oldest_member_ + group_size > kReleaseThreshold) release_entries();
  const auto groups_pending = static_cast<std::uint32_t>(groups_posted_ - groups_arrived_);
  // Twice the batch: one batch of the posted receives is in use and is posted again only as a whole.
  if (arrivals_ == nullptr && groups_pending + 2 * kReceiveBatch > receive_target_ && receive_target_ < max_receives_) {
    receive_target_ = std::min(2 * receive_target_, max_receives_);
    for (std::size_t i = 0; i < queues_.size(); ++i) post_receives(i);
    if (error() != nullptr) return false;
  }
  const std::uint32_t max_groups = arrivals_ == nullptr ? receive_target_ - kReceiveBatch + 1 : wire::kMaxInFlight;
  const std::uint32_t groups = std::min(cts_free(), max_groups - std::min(groups_pending, max_groups));
  const std::uint32_t members = wire::kMaxInFlight - (next_member_ - oldest_member_);
  members_allowed_ = std::min(groups, members);
  // A group needs only one CTS and one receive, whatever its size.
  if (members_allowed_ < group_size && groups != 0 && members >= group_size) members_allowed_ = group_size;
  return members_allowed_ >= group_size;
}

// Members, from the oldest on, whose entries the sender is known to have used. For optional receives the sender reports
// this only now and then; the arrival of a later group implies it too.
std::uint32_t RecvComm::consumed_members() const {
  const auto consumed = static_cast<std::uint32_t>(__atomic_load_n(&record().consumed, __ATOMIC_ACQUIRE));
  std::uint32_t used = consumed - oldest_member_;
  if (used > next_member_ - oldest_member_) used = 0;
  if (optional_posted_) {
    for (std::uint32_t member = oldest_member_; member != next_member_;) {
      const RecvRequest& request = requests_[wire::ring_index(member)];
      if (!request.optional_completion && request.state != RequestState::kPending)
        used = std::max(used, member - oldest_member_);
      member += request.group_size;
    }
  }
  return used;
}

// Frees the ring entries of the oldest groups that were reported done.
void RecvComm::release_entries() {
  const std::uint32_t first_unused = oldest_member_ + consumed_members();
  while (oldest_member_ != next_member_) {
    RecvRequest& oldest = requests_[wire::ring_index(oldest_member_)];
    const bool optional_used =
        oldest.state == RequestState::kDoneUnconfirmed && first_unused - oldest_member_ - 1 < wire::kMaxInFlight;
    if (optional_used) oldest.change_state(RequestState::kFree);
    if (oldest.state != RequestState::kFree) break;
    oldest_member_ += oldest.group_size;
  }
}

// members_allowed_ may have been raised for this group alone: it does not hold for several small ones.
ErrorKind RecvComm::reject_buffer() noexcept {
  members_allowed_ = 0;
  return ErrorKind::kArgument;
}

ErrorKind RecvComm::reject_group_size(int n) const noexcept try {
  VERBATIM_WARN("irecv of a group of %d on %s: 1 to %u (VERBATIM_MAX_RECVS) are possible", n, describe_path(0).c_str(),
                max_recvs_);
  return ErrorKind::kArgument;
} catch (...) {
  return ErrorKind::kSystem;
}

// Posts the CTS of the group whose entries have been written at `entry_address`. If it were not inlined, a receive
// alone would take 117 instructions instead of 104.
template <bool kTimed>
[[gnu::always_inline]] inline void RecvComm::post_group(const std::byte* entry_address, std::uint32_t group_size,
                                                        bool optional_completion, void** out) {
  const std::uint32_t first = next_member_;
  const std::uint32_t index = wire::ring_index(first);
  RecvRequest& request = requests_[index];
  request.group_size = static_cast<std::uint8_t>(group_size);
  request.first_member = first;
  request.optional_completion = optional_completion;
  request.change_state(optional_completion ? RequestState::kDone : RequestState::kPending);
  next_member_ = first + group_size;
  members_allowed_ -= group_size;
  if (arrivals_ != nullptr) arrivals_[index] = 0;
  *out = static_cast<Request*>(&request);

  const auto bytes = static_cast<std::uint32_t>(group_size * entry_bytes_);
  cts_segment_.addr = reinterpret_cast<std::uint64_t>(entry_address);
  cts_segment_.length = bytes;
  cts_work_.wr.rdma.remote_addr = cts_segment_.addr + ring_offset_;
  cts_work_.send_flags = bytes <= cts_inline_bytes_ ? unsigned{IBV_SEND_INLINE} : 0U;
  if ((++groups_posted_ & cts_signal_mask_) == 0) cts_work_.send_flags |= IBV_SEND_SIGNALED;
  const int returned = post_send(cts_qp_, cts_work_);
  if (returned != 0) {
    // Pending even when optional, so that its test returns the error. The request is computed again here: keeping it
    // would cost the usual case a register.
    const auto members = static_cast<std::uint32_t>(cts_segment_.length / entry_bytes_);
    requests_[wire::ring_index(next_member_ - members)].change_state(RequestState::kPending);
    fail_post("ibv_post_send", returned, cts_queue_);
  }
  if constexpr (kTimed) {
    if (optional_completion) return latencies_->posted_optional();
    latencies_->posted(index);
  }
}

// The usual case, one receive that is no group, has a function of its own, whose values fit into the registers.
template <bool kTimed>
[[gnu::always_inline]] inline ErrorKind RecvComm::receive(int n, void* const* data, const std::size_t* sizes,
                                                          const int* tags, void* const* handles, void** out) noexcept {
  begin_call();
  if (n == 1 && handles[0] != nullptr && sizes[0] <= wire::CtsSize::kMaxBytes && failure_state_.acquire_flags() == 0 &&
      members_allowed_ != 0 && *out != kOptionalCompletion) {
    return receive_single<kTimed>(data[0], sizes[0], tags[0], *static_cast<const MemoryHandle*>(handles[0]), out);
  }
  return receive_group<kTimed>(n, data, sizes, tags, handles, out);
}

ErrorKind RecvComm::irecv(int n, void* const* data, const std::size_t* sizes, const int* tags, void* const* handles,
                          void** out) noexcept {
  return receive<false>(n, data, sizes, tags, handles, out);
}

ErrorKind RecvComm::irecv_observed(int n, void* const* data, const std::size_t* sizes, const int* tags,
                                   void* const* handles, void* const* profiler_handles, void** out) noexcept {
  if (profiler_events_ != nullptr) [[unlikely]]
    return irecv_profiled(n, data, sizes, tags, handles, profiler_handles, out);
  return receive<true>(n, data, sizes, tags, handles, out);
}

// The event of a receive lasts from its CTS entry to the arrival of all of its parts.
ErrorKind RecvComm::irecv_profiled(int n, void* const* data, const std::size_t* sizes, const int* tags,
                                   void* const* handles, void* const* profiler_handles, void** out) noexcept {
  const ErrorKind result = latencies_ != nullptr ? receive<true>(n, data, sizes, tags, handles, out)
                                                 : receive<false>(n, data, sizes, tags, handles, out);
  if (*out == nullptr) return result;
  const RecvRequest& request = static_cast<RecvRequest&>(*static_cast<Request*>(*out));
  if (request.optional_completion) return result;
  const std::uint32_t index = wire::ring_index(request.first_member);
  for (std::uint32_t i = 0; i < request.group_size; ++i) {
    profiler_events_->keep_handle(index + i, profiler_handles != nullptr ? profiler_handles[i] : nullptr);
    profiler_events_->start(index + i, cts_queue_,
                            {.device = endpoint_.qps()[cts_queue_].device,
                             .wr_id = cts_work_.wr_id,
                             .opcode = cts_work_.opcode,
                             .qp_num = static_cast<int>(cts_qp_->qp_num),
                             .bytes = posted_[index + i]});
  }
  return result;
}

template <bool kTimed>
ErrorKind RecvComm::receive_single(void* data, std::uint64_t bytes, int tag, const MemoryKeys& memory,
                                   void** out) noexcept {
  *out = nullptr;
  const std::uint32_t index = wire::ring_index(next_member_);
  std::byte* const entry_address = entry(index);
  posted_[index] = bytes;
  ++counts_.groups[0];
  const auto write = [&](auto* entry) {
    write_entry(*entry, next_member_, data, bytes, tag, wire::kSingleReceive, memory);
  };
  if (!wide_entries_) {
    write(reinterpret_cast<wire::CtsEntry*>(entry_address));
  } else {
    write(reinterpret_cast<wire::CtsWideEntry*>(entry_address));
  }
  post_group<kTimed>(entry_address, 1, false, out);
  in_call_.publish(false);
  return ErrorKind::kNone;
}

template <bool kTimed>
ErrorKind RecvComm::receive_group(int n, void* const* data, const std::size_t* sizes, const int* tags,
                                  void* const* handles, void** out) noexcept {
  const Call call(*this);
  const bool optional_completion = *out == kOptionalCompletion;
  *out = nullptr;
  const auto group_size = static_cast<std::uint32_t>(n);
  if (group_size - 1 >= max_recvs_) return reject_group_size(n);
  if (monitor_acts()) {
    if constexpr (kTimed) latencies_->refused();
    return ErrorKind::kNone;
  }
  if ((failure_state_.acquire_flags() != 0 || members_allowed_ < group_size) && !update_allowance(group_size)) {
    if constexpr (kTimed) latencies_->refused();
    return result();
  }
  const std::uint32_t first = next_member_;
  const std::uint32_t index = wire::ring_index(first);
  std::byte* const entry_address = entry(index);
  const wire::CtsSize group = wire::CtsSize::of_group(
      group_size, optional_completion ? wire::CtsFlags::kOptionalCompletion : wire::CtsFlags::kNone);
  std::uint64_t* posted = &posted_[index];
  const auto write = [&](auto* entries) {
    std::size_t all_sizes = 0;  // by OR: one that does not fit shows
    for (std::uint32_t i = 0; i < group_size; ++i) {
      const MemoryKeys* memory = static_cast<const MemoryHandle*>(handles[i]);
      const std::size_t size = sizes[i];
      if (memory == nullptr) {
        if (size != 0) return false;
        memory = &kNoMemory;
      }
      all_sizes |= size;
      posted[i] = size;
      write_entry(entries[i], first + i, data[i], size, tags[i], group, *memory);
    }
    return all_sizes <= wire::CtsSize::kMaxBytes;
  };
  const bool possible = wide_entries_ ? write(reinterpret_cast<wire::CtsWideEntry*>(entry_address))
                                      : write(reinterpret_cast<wire::CtsEntry*>(entry_address));
  if (!possible) return reject_buffer();
  ++counts_.groups[group_size - 1];
  if (optional_completion) {
    optional_posted_ = true;
    ++counts_.optional;
    requests_[index].sizes = wire::SizeSource::kPosted;
  }
  post_group<kTimed>(entry_address, group_size, optional_completion, out);
  if (optional_completion) count_arrival();
  return ErrorKind::kNone;
}

}  // namespace verbatim
