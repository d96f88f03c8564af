#include "net/transfer/send_comm.h"

#include <arpa/inet.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <utility>

#include "base/log.h"
#include "verbs/qp.h"

namespace verbatim {
namespace {

// Enough for all requests of a connection as single small messages, on one device or over the lanes of several; larger
// ones wait for free entries.
constexpr std::uint32_t send_queue_depth(std::size_t devices) {
  return devices == 1 ? wire::kMaxInFlight : LaneLog::kSize;
}
constexpr std::uint32_t kSizeRecordInlineBytes = sizeof(std::uint64_t) * wire::kMaxGroup;  // a size record
// Below this a second QP costs more than it gains: each part has a work request and an immediate of its own.
constexpr std::uint64_t kStripeThresholdBytes = 256 << 10;
// Optional groups between two reports of used CTS entries: few, so that the receiver never waits for a report.
constexpr std::uint32_t kConsumedReportInterval = 8;

}  // namespace

EndpointSizes SendComm::endpoint_sizes(std::size_t devices, std::size_t qps_per_device, const Config& config) {
  EndpointSizes sizes;
  sizes.qps = std::min(qps_per_device * devices, wire::kMaxQps);
  // The atomic after each message is a second work request.
  sizes.caps.send_wr = (config.completion == Completion::kAtomic ? 2 : 1) * send_queue_depth(devices);
  sizes.caps.recv_wr = 1;  // nothing is received, but some devices refuse 0
  sizes.caps.inline_bytes = kSizeRecordInlineBytes;
  return sizes;
}

std::size_t SendComm::control_bytes(std::size_t remote_devices) {
  return wire::cts_ring_bytes(remote_devices) + sizeof(WriteSources);
}

Result<std::unique_ptr<SendComm>> SendComm::create(const CommSettings& settings, Endpoint endpoint,
                                                   std::size_t remote_devices) {
  Result<ControlMemory> control = ControlMemory::create(endpoint.ports(), control_bytes(remote_devices));
  if (!control) return control.error();
  return std::unique_ptr<SendComm>(new SendComm(settings, std::move(endpoint), std::move(*control), remote_devices));
}

SendComm::SendComm(const CommSettings& settings, Endpoint endpoint, ControlMemory control, std::size_t remote_devices)
    : CommProgress(CommKind::kSend, settings, std::move(endpoint), std::move(control)),
      entry_bytes_(wire::cts_entry_bytes(remote_devices)),
      ready_offset_(entry_bytes_ - sizeof(std::uint32_t)) {
  for (std::uint32_t i = 0; i < kBatch; ++i) {
    ibv_send_wr& request = work_[i].request;
    request.sg_list = &work_[i].segment;
    request.next = i + 1 < kBatch ? &work_[i + 1].request : nullptr;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.num_sge = 1;
  }
  single_.sg_list = separate_data_.sg_list = &single_segment_;
  separate_data_.opcode = IBV_WR_RDMA_WRITE;
  for (ibv_send_wr* work : {&single_, &empty_signal_, &tail_signal_}) {
    work->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    work->send_flags = IBV_SEND_SIGNALED;
  }
  tail_signal_.sg_list = &tail_segment_;
  tail_signal_.num_sge = 1;
  for (std::uint32_t i = 0; i < requests_.size(); ++i) {
    requests_[i].comm = this;
    requests_[i].optional_member = i + 1;  // never begins here
  }
  set_head(0);
}

std::uint32_t SendComm::capabilities() const {
  const bool able = std::all_of(endpoint_.ports().begin(), endpoint_.ports().end(), [](const Port* port) {
    return port->device->attributes().atomic_cap != IBV_ATOMIC_NONE && initiator_reads(*port->device) != 0;
  });
  return able && settings_.config.completion == Completion::kAtomic ? wire::kAtomicCompletion : 0U;
}

Result<bool> SendComm::connect(const wire::Hello& remote, int traffic_class, VerbBudget& budget) {
  const Config& config = settings_.config;
  if (wire::cts_entry_bytes(remote.devices.size()) != entry_bytes_) {
    return Error{ErrorKind::kRemote, EPROTO, "hello with another device count than the handle"};
  }
  const Result<bool> connected = endpoint_.connect(remote, config, traffic_class, budget);
  if (!connected || !*connected) return connected;
  for (const EndpointQp& end : endpoint_.qps()) {
    const auto index = static_cast<std::uint32_t>(queues_.size());
    queues_.push_back({end.qp.get(), end.send_wr, remote.devices[end.remote_device].control_rkey, end.inline_bytes,
                       end.device, end.remote_device, static_cast<std::uint8_t>(index),
                       encode_send_work(0, index, 1, true) | kSendSingle});
  }
  queue_count_ = static_cast<std::uint32_t>(queues_.size());
  enable_failover();
  set_turns();
  striping_.set_shares(working_shares());
  record_address_ = remote.control_address;
  max_piece_bytes_ = endpoint_.max_message_bytes();
  atomic_ = (remote.capabilities & capabilities() & wire::kAtomicCompletion) != 0;
  if (config.completion == Completion::kAtomic && !atomic_) {
    atomics_refused_ = capabilities() == 0 ? "the device has no atomics" : "the peer does not use them";
  }
  adaptive_routing_ = std::any_of(endpoint_.ports().begin(), endpoint_.ports().end(),
                                  [](const Port* port) { return port->adaptive_routing; });
  adaptive_routing_threshold_ = config.adaptive_routing_threshold;
  const Switch split = queue_count_ == 1 ? Switch::kOff : config.split_data_on_qps;
  stripe_threshold_ = split == Switch::kOn    ? 0
                      : split == Switch::kOff ? std::numeric_limits<std::uint64_t>::max()
                                              : kStripeThresholdBytes;
  simple_limit_bytes_ = std::min(std::uint64_t{max_piece_bytes_} + 1, stripe_threshold_);
  single_limit_bytes_ =
      adaptive_routing_ ? std::min(simple_limit_bytes_, adaptive_routing_threshold_ + 1) : simple_limit_bytes_;
  if (adaptive_routing_) separate_limit_bytes_ = simple_limit_bytes_;
  if (atomic_) single_limit_bytes_ = separate_limit_bytes_ = 0;
  if (can_lose_lanes()) {
    logs_.resize(queues_.size());
    single_limit_bytes_ = separate_limit_bytes_ = 0;  // send_single keeps no log
  }
  empty_signal_.wr.rdma.remote_addr = record_address_;
  if (config.latency) latencies_ = std::make_unique<SendLatencies>();
  profiler_events_ = make_profiler_events();
  if (latencies_ != nullptr) isend_ = isend_plain<true>;
  if (profiler_events_ != nullptr) isend_ = isend_profiled;
  for (SendRequest& request : requests_) {
    request.kind = profiler_events_ != nullptr ? RequestKind::kProfiledSend
                   : latencies_ != nullptr     ? RequestKind::kTimedSend
                                               : RequestKind::kSend;
  }
  return true;
}

std::uint32_t SendComm::remote_key(std::uint32_t index, std::size_t remote_device) const {
  const std::byte* keys = control_.data() + index * entry_bytes_ + offsetof(wire::CtsEntry, rkey);
  return reinterpret_cast<const std::uint32_t*>(keys)[remote_device];
}

// The steps of isend are functions of their own so that the shortest, a refused isend, saves no registers.
template <bool kTimed>
[[gnu::always_inline]] inline ErrorKind SendComm::send_to_head(const void* data, std::size_t bytes, int tag,
                                                               const MemoryKeys& memory, void** request) noexcept {
  *request = nullptr;
  if (group_.open_members != 0) {
    return kTimed ? send_group_timed(data, bytes, tag, memory, request)
                  : send_member(data, bytes, tag, memory, request);
  }
  if (!ready(head_entry_, head())) {
    send_refused_ = true;
    return slow_path_flags() == 0 ? ErrorKind::kNone : no_matching_receive();
  }
  const auto& entry_head = *reinterpret_cast<const wire::CtsEntry*>(head_entry_);
  const auto is_single = [&] { return entry_head.size.is_of(wire::kSingleReceive) && slow_path_flags() == 0; };
  if (bytes < single_limit_bytes_) {
    if (is_single()) return send_single<Signal::kWithData, kTimed>(data, bytes, tag, memory, request);
  } else if (bytes < separate_limit_bytes_) {
    if (is_single()) {
      return entry_head.size.bytes() == bytes
                 ? send_single<Signal::kEmpty, kTimed>(data, bytes, tag, memory, request)
                 : send_single<Signal::kWithTail, kTimed>(data, bytes, tag, memory, request);
    }
  }
  return kTimed ? send_group_timed(data, bytes, tag, memory, request) : begin_group(data, bytes, tag, memory, request);
}

template <bool kTimed>
ErrorKind SendComm::isend_plain(SendComm& comm, const void* data, std::size_t bytes, int tag, const MemoryKeys* memory,
                                void*, void** request) noexcept {
  if (memory == nullptr) {
    *request = nullptr;
    if (bytes != 0) return ErrorKind::kArgument;
    memory = &kNoMemory;
  }
  return comm.send_to_head<kTimed>(data, bytes, tag, *memory, request);
}

ErrorKind SendComm::no_matching_receive() noexcept {
  send_refused_ = true;
  if ((slow_path_flags() & (kCommEvents | kProbing | kLanes)) == 0) return result();
  // An application that only waits for receives does not poll.
  if (is_probing() || lanes_change()) progress();
  check_events(true);
  return result();
}

// A single message: one WRITE with immediate; or, where adaptive routing may deliver the immediate before the data, a
// WRITE and a signal of its own, which carries the last bytes of a message that is shorter than its buffer.
template <SendComm::Signal kSignal, bool kTimed>
ErrorKind SendComm::send_single(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                                void** out) noexcept {
  constexpr bool kSeparate = kSignal != Signal::kWithData;
  constexpr std::uint32_t kWorkRequests = kSeparate ? 2 : 1;
  const std::byte* const entry_address = head_entry_;
  const auto& entry_head = *reinterpret_cast<const wire::CtsEntry*>(entry_address);
  const std::uint64_t head = head_;
  const auto member = static_cast<std::uint32_t>(head);
  const std::uint32_t index = wire::ring_index(member);
  SendRequest& request = requests_[index];
  if (entry_head.tag != static_cast<std::uint32_t>(tag) || request.state != RequestState::kFree) {
    send_refused_ = true;
    return ErrorKind::kNone;
  }
  const std::uint64_t buffer_bytes = kSignal == Signal::kEmpty ? bytes : entry_head.size.bytes();
  if (bytes > buffer_bytes) return fail_size_mismatch(bytes, entry_head);
  const Turn& turn = *turn_;
  SendQueue& queue = *turn.queue;
  const std::uint32_t free = queue.free;
  wire::Immediate immediate{index, kSeparate ? wire::SizeSource::kPosted : wire::SizeSource::kByteCount, 1,
                            wire::ring_pass(member)};
  const std::uint32_t tail = kSignal == Signal::kWithTail ? set_units(immediate, bytes, buffer_bytes) : 0;
  if (free < kWorkRequests || separates_completion(tail)) {
    return kTimed ? send_group_timed(data, bytes, tag, memory, out) : begin_group(data, bytes, tag, memory, out);
  }
  turn_ = turn.next;
  queue.free = free - kWorkRequests;
  bytes_ += bytes;
  set_head(head + 1);
  request.state = RequestState::kPending;
  request.bytes = bytes;
  request.data = data;
  request.memory = &memory;
  if constexpr (kTimed) latencies_->accepted(index, read_ticks());
  single_segment_ = {reinterpret_cast<std::uint64_t>(data), static_cast<std::uint32_t>(bytes),
                     memory.lkey[queue.device]};
  ibv_send_wr& work = kSeparate ? separate_data_ : single_;
  work.wr_id = queue.single_wr_id | index;
  work.wr.rdma.remote_addr = entry_head.address;
  work.wr.rdma.rkey =
      reinterpret_cast<const std::uint32_t*>(entry_address + offsetof(wire::CtsEntry, rkey))[queue.remote_device];
  if constexpr (kSeparate) {
    link_signal(queue, work.wr_id + (std::uint64_t{1} << kSendCountShift), wire::encode_immediate(immediate), tail);
  } else {
    work.num_sge = bytes != 0 ? 1 : 0;
    work.imm_data = htonl(wire::encode_immediate(immediate));
  }
  *out = static_cast<Request*>(&request);
  const int returned = post_send(queue.qp, work);
  if (returned != 0) fail_post("ibv_post_send", returned, work.wr_id >> 16 & 0xffff);
  return ErrorKind::kNone;
}

// begin_group or send_member, with its time.
ErrorKind SendComm::send_group_timed(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                                     void** request) noexcept {
  const std::uint64_t now = read_ticks();
  const ErrorKind result = group_.open_members != 0 ? send_member(data, bytes, tag, memory, request)
                                                    : begin_group(data, bytes, tag, memory, request);
  if (*request != nullptr) {
    const auto& accepted = static_cast<SendRequest&>(*static_cast<Request*>(*request));
    latencies_->accepted(static_cast<std::uint32_t>(&accepted - requests_.data()), now);
  }
  return result;
}

// The first member of a group, a message that is not simple, or a comm with flags set.
ErrorKind SendComm::begin_group(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                                void** request) noexcept {
  if (slow_path_flags() != 0 && !can_send()) {
    send_refused_ = true;
    return result();
  }
  if (!load_head_group(wire::ring_index(head()))) return result();
  return send_member(data, bytes, tag, memory, request);
}

ErrorKind SendComm::send_member(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                                void** request) noexcept {
  const auto& entry_head = *reinterpret_cast<const wire::CtsEntry*>(group_.entry_address);
  if (group_.out_of_order || slow_path_flags() != 0 || entry_head.tag != static_cast<std::uint32_t>(tag)) {
    return send_out_of_order(data, bytes, tag, memory, request);
  }
  return add_member(group_.open_members & (group_.open_members - 1), data, bytes, memory, request);
}

// Messages in another order than the members, which NCCL does not do; or a comm with flags set.
ErrorKind SendComm::send_out_of_order(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory,
                                      void** request) noexcept {
  if (error() != nullptr || lanes_change()) return no_matching_receive();
  for (std::uint32_t open_members = group_.open_members; open_members != 0; open_members &= open_members - 1) {
    const auto member = static_cast<std::uint32_t>(std::countr_zero(open_members));
    if (entry(group_.index + member).tag != static_cast<std::uint32_t>(tag)) continue;
    group_.out_of_order = true;
    select_member(member);
    return add_member(group_.open_members & ~(1U << member), data, bytes, memory, request);
  }
  return no_matching_receive();
}

inline void SendComm::select_member(std::uint32_t member) {
  group_.entry_address = control_.data() + (group_.index + member) * entry_bytes_;
  group_.request = &requests_[group_.index + member];
  group_.work = &work_[member];
}

// With flags set: whether the comm works and no message waits for free entries of a send queue.
bool SendComm::can_send() {
  if (pending_post_.active || lanes_change()) progress();
  // A message that is posted now would never be acknowledged.
  if (is_peer_or_device_dead()) check_events(true);
  return error() == nullptr && !pending_post_.active && !is_peer_or_device_dead() && !lanes_change();
}

bool SendComm::post_probe(std::size_t qp, int& returned) noexcept {
  SendQueue& queue = queues_[qp];
  if (queue.free == 0) return false;
  queue.free -= 1;
  const std::uint64_t wr_id = encode_send_work(0, static_cast<std::uint32_t>(qp), 1, false) | kSendProbe;
  returned = post_empty_write(queue.qp, wr_id, record_address_, queue.record_rkey);
  return true;
}

// Whether all CTS entries of the group at the head have arrived; if so `group_` holds it.
bool SendComm::load_head_group(std::uint32_t index) {
  const std::byte* const entries = control_.data() + index * entry_bytes_;
  wire::CtsSize announced = entry(index).size;
  asm("" : "+r"(announced));  // read only once, because the peer may change it at any time
  const std::uint32_t group_size = announced.group_size();
  if (group_size - 1 >= wire::kMaxGroup) return fail_invalid_cts();
  const std::byte* entry_address = entries;
  const std::uint32_t end = head() + group_size;
  for (std::uint32_t member = head() + 1; member != end; ++member) {
    entry_address += entry_bytes_;
    if (ready(entry_address, member)) continue;
    send_refused_ = true;
    return false;
  }
  const SendQueue& queue = *turn_->queue;
  group_.open_members = (1U << group_size) - 1;
  group_.out_of_order = false;
  group_.empty = false;
  group_.optional_completion = announced.flags() == wire::CtsFlags::kOptionalCompletion;
  group_.device = queue.device;
  group_.bytes = 0;
  group_.buffer_bytes = 0;
  group_.key_offset = offsetof(wire::CtsEntry, rkey) + queue.remote_device * sizeof(std::uint32_t);
  group_.wr_id = encode_send_work(index, queue.index, 0, false);
  group_.group_size = group_size;
  group_.index = index;
  select_member(0);
  return true;
}

// Accepts the message of the member that `group_` points at, and formats its WRITE; the last member posts the group.
inline ErrorKind SendComm::add_member(std::uint32_t still_open, const void* data, std::size_t bytes,
                                      const MemoryKeys& memory, void** out) noexcept {
  const std::byte* const entry_address = group_.entry_address;
  const auto& entry_head = *reinterpret_cast<const wire::CtsEntry*>(entry_address);
  SendRequest& request = *group_.request;
  // Not free: the request of one ring pass ago has not been tested yet.
  if (request.state != RequestState::kFree) return result();
  const std::uint64_t buffer_bytes = entry_head.size.bytes();
  if (bytes > buffer_bytes) return fail_size_mismatch(bytes, entry_head);
  request.state = RequestState::kPending;
  request.bytes = bytes;
  request.data = data;
  request.memory = &memory;
  *out = static_cast<Request*>(&request);
  group_.bytes += bytes;
  group_.buffer_bytes += buffer_bytes;
  if (bytes == 0) group_.empty = true;
  Work& work = *group_.work;
  work.segment = {reinterpret_cast<std::uint64_t>(data), static_cast<std::uint32_t>(bytes), memory.lkey[group_.device]};
  work.memory = &memory;
  work.request.wr_id = group_.wr_id;
  work.request.wr.rdma.remote_addr = entry_head.address;
  work.request.wr.rdma.rkey = *reinterpret_cast<const std::uint32_t*>(entry_address + group_.key_offset);
  group_.open_members = still_open;
  if (still_open == 0) return post_group();
  group_.entry_address = entry_address + entry_bytes_;
  ++group_.request;
  ++group_.work;
  return ErrorKind::kNone;
}

// Sends the head group, which is complete: in the common case with one doorbell on one QP.
ErrorKind SendComm::post_group() noexcept {
  const Turn& turn = *turn_;
  SendQueue& queue = *turn.queue;
  const std::uint64_t head = head_;
  const auto member = static_cast<std::uint32_t>(head);
  set_head(head + group_.group_size);
  bytes_ += group_.bytes;
  if (group_.bytes >= simple_limit_bytes_ || group_.empty || queue.free < group_.group_size + 2) {
    if (can_post_stripes()) {
      post_stripes(member);
    } else {
      start_pending_post(member, group_.group_size);
    }
    return ErrorKind::kNone;
  }
  const std::uint32_t count = append_completion(queue, group_.group_size, member, group_.bytes == group_.buffer_bytes);
  SendRequest& first = requests_[group_.index];
  first.group_size = static_cast<std::uint8_t>(group_.group_size);
  first.parts_left = 1;
  turn_ = turn.next;
  log_part(queue.index, {.index = static_cast<std::uint16_t>(group_.index), .last = kWholeMessage - 1},
           !group_.optional_completion);
  post(queue, count, encode_send_work(group_.index, queue.index, count, true));
  return ErrorKind::kNone;
}

// Formats the completion signal after the `count` WRITEs of the head group; returns the number of work requests.
inline std::uint32_t SendComm::append_completion(SendQueue& queue, std::uint32_t count, std::uint32_t member,
                                                 bool full) {
  const std::uint32_t index = group_.index;
  if (group_.optional_completion) {
    requests_[index].optional_member = member;
    if (reports_consumed()) format_consumed_write(count++, queue);
  } else if (atomic_) {
    if (!full && group_.group_size > 1) append_size_record(count++, queue);
    format_arrival_atomic(count++, queue, index, wire::encode_arrival(group_.bytes, 0, 1));
  } else {
    // The last WRITE carries the immediate, unless sizes must be written before it, or adaptive routing may deliver the
    // immediate before the data.
    wire::Immediate immediate{index, wire::SizeSource::kPosted, 1, wire::ring_pass(member)};
    const bool separate = separates_completion(group_.bytes);
    std::uint32_t tail = 0;
    if (!full && group_.group_size == 1) {
      immediate.sizes = wire::SizeSource::kByteCount;
      if (separate) tail = set_units(immediate, group_.bytes, group_.buffer_bytes);
    }
    if (!full && (group_.group_size > 1 || separates_completion(tail))) {
      immediate.sizes = wire::SizeSource::kRecord;
      append_size_record(count++, queue);
    } else if (tail != 0) {
      format_tail(count++, tail);
    } else if (separate) {
      format_empty_write(count++, queue);
    }
    set_immediate(count - 1, immediate);
  }
  return count;
}

void SendComm::format_size_record(std::uint32_t at, const SendQueue& queue, std::uint32_t index,
                                  std::uint32_t group_size) {
  ibv_send_wr& work = work_[at].request;
  const auto bytes = static_cast<std::uint32_t>(group_size * sizeof(std::uint64_t));
  work_[at].segment = {reinterpret_cast<std::uint64_t>(&write_sources().size[index]), bytes,
                       control_.lkey(queue.device)};
  work.wr_id = encode_send_work(index, static_cast<std::uint32_t>(&queue - queues_.data()), 0, false);
  work.wr.rdma.remote_addr = record_address_ + offsetof(wire::CompletionRecord, size) + index * sizeof(std::uint64_t);
  work.wr.rdma.rkey = queue.record_rkey;
  if (bytes <= queue.inline_bytes) work.send_flags |= IBV_SEND_INLINE;
}

void SendComm::format_empty_write(std::uint32_t at, const SendQueue& queue) {
  // rdma-core's irdma sends the first segment of a WRITE without immediate even if num_sge is 0.
  work_[at].segment = {control_.address(), 0, control_.lkey(queue.device)};
  work_[at].request.num_sge = 0;
  work_[at].request.wr.rdma.remote_addr = record_address_;
  work_[at].request.wr.rdma.rkey = queue.record_rkey;
}

void SendComm::format_consumed_write(std::uint32_t at, const SendQueue& queue) {
  ibv_send_wr& work = work_[at].request;
  write_sources().consumed = head_;
  constexpr std::uint32_t kBytes = sizeof(std::uint64_t);
  work_[at].segment = {reinterpret_cast<std::uint64_t>(&write_sources().consumed), kBytes, control_.lkey(queue.device)};
  work.wr.rdma.remote_addr = record_address_ + offsetof(wire::CompletionRecord, consumed);
  work.wr.rdma.rkey = queue.record_rkey;
  if (kBytes <= queue.inline_bytes) work.send_flags |= IBV_SEND_INLINE;
}

void SendComm::format_arrival_atomic(std::uint32_t at, const SendQueue& queue, std::uint32_t index,
                                     std::uint64_t addend) {
  ibv_send_wr& work = work_[at].request;
  work_[at].segment = {reinterpret_cast<std::uint64_t>(&write_sources().atomic_result), sizeof(std::uint64_t),
                       control_.lkey(queue.device)};
  work.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  work.wr.atomic.remote_addr =
      record_address_ + offsetof(wire::CompletionRecord, arrival) + index * sizeof(std::uint64_t);
  work.wr.atomic.compare_add = addend;
  work.wr.atomic.rkey = queue.record_rkey;
}

void SendComm::set_immediate(std::uint32_t at, const wire::Immediate& immediate) {
  work_[at].request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  work_[at].request.imm_data = htonl(wire::encode_immediate(immediate));
}

// The last bytes of separate_data_.
ibv_send_wr& SendComm::format_tail_signal(std::uint32_t bytes) {
  single_segment_.length -= bytes;
  tail_segment_ = {single_segment_.addr + single_segment_.length, bytes, single_segment_.lkey};
  tail_signal_.wr.rdma.remote_addr = separate_data_.wr.rdma.remote_addr + single_segment_.length;
  tail_signal_.wr.rdma.rkey = separate_data_.wr.rdma.rkey;
  return tail_signal_;
}

// The last bytes, but not all, of the WRITE before it.
void SendComm::format_tail(std::uint32_t at, std::uint32_t bytes) {
  Work& data = work_[at - 1];
  Work& tail = work_[at];
  data.segment.length -= bytes;
  tail.segment = {data.segment.addr + data.segment.length, bytes, data.segment.lkey};
  tail.request.wr.rdma.remote_addr = data.request.wr.rdma.remote_addr + data.segment.length;
  tail.request.wr.rdma.rkey = data.request.wr.rdma.rkey;
}

void SendComm::append_size_record(std::uint32_t at, const SendQueue& queue) {
  store_sizes(group_.index, group_.group_size);
  format_size_record(at, queue, group_.index, group_.group_size);
}

bool SendComm::reports_consumed() {
  if (++unreported_optional_groups_ < kConsumedReportInterval) return false;
  unreported_optional_groups_ = 0;
  return true;
}

void SendComm::store_sizes(std::uint32_t index, std::uint32_t group_size) const {
  for (std::uint32_t i = 0; i < group_size; ++i) write_sources().size[index + i] = requests_[index + i].bytes;
}

// Posts the first `count` of work_, the last one signalled. Afterwards the last two, which alone may have been
// something else, are WRITEs of one segment again.
void SendComm::post(SendQueue& queue, std::uint32_t count, std::uint64_t wr_id) {
  ibv_send_wr& last = work_[count - 1].request;
  ibv_send_wr* const next = std::exchange(last.next, nullptr);
  last.send_flags |= IBV_SEND_SIGNALED;
  last.wr_id = wr_id;
  queue.free -= count;
  const int returned = post_send(queue.qp, work_[0].request);
  last.next = next;
  for (ibv_send_wr* work : {&last, &work_[count > 1 ? count - 2 : 0].request}) {
    work->opcode = IBV_WR_RDMA_WRITE;
    work->num_sge = 1;
    work->send_flags = 0;
  }
  if (returned != 0) fail_post("ibv_post_send", returned, static_cast<std::size_t>(&queue - queues_.data()));
}

}  // namespace verbatim
