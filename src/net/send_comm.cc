#include "net/send_comm.h"

#include <arpa/inet.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <utility>

#include "base/log.h"
#include "net/net.h"

namespace verbatim {
namespace {

// Enough for all requests of a connection as single small messages; longer ones wait for room.
constexpr std::uint32_t kSendQueueDepth = wire::kMaxInFlight;
constexpr std::uint32_t kInlineBytes = sizeof(std::uint64_t) * wire::kMaxGroup;  // a size record
// Below this a second QP costs more work requests and completions than its bandwidth gives back.
constexpr std::uint64_t kStripeThresholdBytes = 256 << 10;
constexpr std::uint64_t kStripeAlignBytes = 128;  // LL128 writes lines of this size, which must arrive whole

// wr_id of a signalled work request: bits 0-15 ring index of the group, 16-31 queue, 32-47 work requests that are done
// with it, 48 whether its part of the group is.
constexpr std::uint64_t encode_wr_id(std::uint32_t index, std::uint32_t queue, std::uint32_t count, bool part_done) {
  return index | std::uint64_t{queue} << 16 | std::uint64_t{count} << 32 | std::uint64_t{part_done} << 48;
}

std::size_t control_bytes(std::size_t devices) {
  return wire::cts_ring_bytes(devices) + sizeof(wire::SizeRecord);
}

}  // namespace

EndpointSizes SendComm::endpoint_sizes(std::size_t devices, std::size_t qps_per_device) {
  EndpointSizes sizes;
  sizes.qps = std::min(qps_per_device * devices, wire::kMaxQps);
  sizes.caps.send_wr = kSendQueueDepth;
  sizes.caps.recv_wr = 1;  // nothing is received here, but not every device takes 0
  sizes.caps.inline_bytes = kInlineBytes;
  return sizes;
}

Result<std::unique_ptr<SendComm>> SendComm::create(Context& context, Endpoint endpoint, std::size_t remote_devices) {
  Result<ControlMemory> control = ControlMemory::create(endpoint.ports(), control_bytes(remote_devices));
  if (!control) return control.error();
  return std::unique_ptr<SendComm>(new SendComm(context, std::move(endpoint), std::move(*control), remote_devices));
}

SendComm::SendComm(Context& context, Endpoint endpoint, ControlMemory control, std::size_t remote_devices)
    : Comm(CommKind::kSend, context, std::move(endpoint), std::move(control)),
      entry_bytes_(wire::cts_entry_bytes(remote_devices)),
      ready_offset_(entry_bytes_ - sizeof(std::uint32_t)) {
  for (std::uint32_t i = 0; i < kBatch; ++i) {
    work_[i].sg_list = &segments_[i];
    work_[i].next = i + 1 < kBatch ? &work_[i + 1] : nullptr;
    work_[i].opcode = IBV_WR_RDMA_WRITE;
    work_[i].num_sge = 1;
  }
  for (SendRequest& request : requests_) request.comm = this;
}

Status SendComm::connect(const wire::Hello& remote, int traffic_class) {
  const Config& config = context_.config();
  if (wire::cts_entry_bytes(remote.devices.size()) != entry_bytes_) {
    return Error{ErrorKind::kRemote, 0, "hello with another device count than the handle"};
  }
  if (const Status connected = endpoint_.connect(remote, config, traffic_class); !connected) return connected;
  for (const EndpointQp& end : endpoint_.qps()) {
    queues_.push_back({end.qp.get(), end.send_wr, remote.devices[end.remote_device].control_rkey, end.inline_bytes,
                       end.device, end.remote_device});
  }
  record_address_ = remote.control_address;
  max_piece_bytes_ = endpoint_.max_message_bytes();
  adaptive_routing_ = std::any_of(endpoint_.ports().begin(), endpoint_.ports().end(),
                                  [](const Port* port) { return port->adaptive_routing; });
  adaptive_routing_threshold_ = config.adaptive_routing_threshold;
  switch (config.split_data_on_qps) {
    case Switch::kAuto:
      stripe_threshold_ = kStripeThresholdBytes;
      break;
    case Switch::kOff:
      stripe_threshold_ = std::numeric_limits<std::uint64_t>::max();
      break;
    case Switch::kOn:
      stripe_threshold_ = 0;
      break;
  }
  if (queues_.size() == 1) stripe_threshold_ = std::numeric_limits<std::uint64_t>::max();
  complex_bytes_ = std::min(std::uint64_t{max_piece_bytes_} + 1, stripe_threshold_);
  return {};
}

std::uint32_t SendComm::remote_key(std::uint32_t index, std::size_t remote_device) const {
  const std::byte* keys = control_.data() + index * entry_bytes_ + sizeof(wire::CtsHead);
  return reinterpret_cast<const std::uint32_t*>(keys)[remote_device];
}

wire::SizeRecord& SendComm::record_shadow() const {
  return *reinterpret_cast<wire::SizeRecord*>(control_.data() + entry_bytes_ * wire::kRingEntries);
}

Request* SendComm::isend(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory) {
  if (error() != nullptr) return nullptr;
  if (group_.open == 0) {
    const std::uint32_t index = wire::ring_index(head_);
    const std::byte* const place = control_.data() + index * entry_bytes_;
    if (!ready(place, head_)) {
      hear_signals(true);
      return nullptr;
    }
    if (posting_.active && !finish_posting()) return nullptr;
    if (entry(index).group_size == 1) return send_single(index, data, bytes, tag, memory);
    if (!open_group(index)) return nullptr;
  }
  // In the order of the members, as NCCL sends; any other order is found.
  const auto member = static_cast<std::uint32_t>(std::countr_zero(group_.open));
  if (entry(group_.index + member).tag != static_cast<std::uint32_t>(tag)) return find_member(data, bytes, tag, memory);
  return take(member, data, bytes, memory);
}

[[gnu::cold]] bool SendComm::finish_posting() {
  progress();
  return !posting_.active;
}

// A message alone: one WRITE that carries its immediate itself, or the long way.
inline Request* SendComm::send_single(std::uint32_t index, const void* data, std::size_t bytes, int tag,
                                      const MemoryKeys& memory) {
  const wire::CtsHead& wanted = entry(index);
  SendRequest& request = requests_[index];
  if (wanted.tag != static_cast<std::uint32_t>(tag) || request.state != RequestState::kFree) return nullptr;
  if (bytes > wanted.size) return refuse_size(bytes, wanted);
  const std::uint32_t member = head_++;
  request.state = RequestState::kPending;
  request.memory = &memory;
  request.data = reinterpret_cast<std::uint64_t>(data);
  request.bytes = bytes;
  const std::uint32_t used = next_queue_;
  SendQueue& queue = queues_[used];
  if (bytes >= complex_bytes_ || queue.free == 0 || separates_completion(bytes)) {
    start_posting(member, 1);
    return &request;
  }
  ibv_send_wr& work = work_[0];
  segments_[0] = {request.data, static_cast<std::uint32_t>(bytes), memory.lkey[queue.device]};
  work.num_sge = bytes != 0 ? 1 : 0;
  work.wr.rdma.remote_addr = wanted.address;
  work.wr.rdma.rkey = remote_key(index, queue.remote_device);
  post_last(request, queue, used, work, {index, wire::SizeSource::kByteCount, 1, wire::ring_pass(member)}, 1, 1);
  return &request;
}

// Whether all CTS entries of the group at the head are there; if so `group_` holds it.
bool SendComm::open_group(std::uint32_t index) {
  const std::byte* const entries = control_.data() + index * entry_bytes_;
  const std::uint32_t group_size = entry(index).group_size;
  if (group_size - 1 >= wire::kMaxGroup) return refuse_entry();
  for (std::uint32_t i = 1; i < group_size; ++i) {
    if (!ready(entries + i * entry_bytes_, head_ + i)) return false;
  }
  const SendQueue& queue = queues_[next_queue_];
  group_.open = (1U << group_size) - 1;
  group_.group_size = group_size;
  group_.index = index;
  group_.formatted = 0;
  group_.bytes = 0;
  group_.unfilled = 0;
  group_.entries = entries;
  group_.key_offset = sizeof(wire::CtsHead) + queue.remote_device * sizeof(std::uint32_t);
  group_.wr_id = encode_wr_id(index, next_queue_, 0, false);
  group_.device = queue.device;
  return true;
}

Request* SendComm::find_member(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory) {
  for (std::uint32_t open = group_.open; open != 0; open &= open - 1) {
    const auto member = static_cast<std::uint32_t>(std::countr_zero(open));
    if (entry(group_.index + member).tag == static_cast<std::uint32_t>(tag)) return take(member, data, bytes, memory);
  }
  return nullptr;
}

// Takes in the message of a member of the head group, and formats its WRITE; the last one rings the doorbell.
inline Request* SendComm::take(std::uint32_t member, const void* data, std::size_t bytes, const MemoryKeys& memory) {
  const std::byte* const place = group_.entries + member * entry_bytes_;
  const auto& wanted = *reinterpret_cast<const wire::CtsHead*>(place);
  SendRequest& request = requests_[group_.index + member];
  if (request.state != RequestState::kFree) return nullptr;  // a full round of requests that nobody has tested
  if (bytes > wanted.size) return refuse_size(bytes, wanted);
  request.state = RequestState::kPending;
  request.memory = &memory;
  request.data = reinterpret_cast<std::uint64_t>(data);
  request.bytes = bytes;
  group_.bytes += bytes;
  group_.unfilled += wanted.size - bytes;
  if (bytes - 1 < max_piece_bytes_) {  // not empty, and no message for the long way
    ibv_send_wr& work = work_[group_.formatted];
    segments_[group_.formatted] = {request.data, static_cast<std::uint32_t>(bytes), memory.lkey[group_.device]};
    work.wr_id = group_.wr_id;
    work.wr.rdma.remote_addr = wanted.address;
    work.wr.rdma.rkey = *reinterpret_cast<const std::uint32_t*>(place + group_.key_offset);
    ++group_.formatted;
  }
  group_.open &= ~(1U << member);
  if (group_.open == 0) post_group(requests_[group_.index]);
  return &request;
}

// Sends the head group, which is complete: the common case, one doorbell on one QP, or the long way.
void SendComm::post_group(SendRequest& first) {
  const std::uint32_t used = next_queue_;
  SendQueue& queue = queues_[used];
  const std::uint32_t member = std::exchange(head_, head_ + group_.group_size);
  const bool full = group_.unfilled == 0;
  // The last WRITE carries the immediate itself, unless sizes have to be told first or its data may come later.
  const bool rides = group_.formatted != 0 && full && !separates_completion(group_.bytes);
  const std::uint32_t count = group_.formatted + (rides ? 0 : 1);
  if (group_.bytes >= complex_bytes_ || queue.free < count) return start_posting(member, group_.group_size);
  const wire::SizeSource sizes = full ? wire::SizeSource::kPosted : wire::SizeSource::kRecord;
  ibv_send_wr& last = work_[count - 1];
  if (!rides) {
    if (!full) tell_sizes(group_.index, group_.group_size);
    finish_part(queue, last, segments_[count - 1], group_.index, group_.group_size, sizes);
  }
  post_last(first, queue, used, last, {group_.index, sizes, 1, wire::ring_pass(member)}, count, group_.group_size);
}

// Sends work_ up to `last`, which tells the receiver that the group has arrived.
inline void SendComm::post_last(SendRequest& first, SendQueue& queue, std::uint32_t queue_index, ibv_send_wr& last,
                                const wire::Immediate& immediate, std::uint32_t count, std::uint32_t group_size) {
  last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  last.imm_data = htonl(wire::encode_immediate(immediate));
  last.send_flags |= IBV_SEND_SIGNALED;
  last.wr_id = encode_wr_id(immediate.entry, queue_index, count, true);
  first.group_size = static_cast<std::uint8_t>(group_size);
  first.parts_left = 1;
  queue.free -= count;
  next_queue_ = queue_index + 1 == queues_.size() ? 0 : queue_index + 1;
  post(queue, last);
}

[[gnu::cold]] bool SendComm::refuse_entry() {
  fail(ErrorKind::kRemote, "CTS", "the peer wrote an impossible CTS entry: " + endpoint_.describe_path(0));
  return false;
}

[[gnu::cold]] Request* SendComm::refuse_size(std::size_t bytes, const wire::CtsHead& wanted) {
  fail(ErrorKind::kUsage, "isend",
       "isend of " + std::to_string(bytes) + " bytes, but the receive posted for tag " + std::to_string(wanted.tag) +
           " holds " + std::to_string(wanted.size) + ": sender and receiver disagree on the count, " +
           endpoint_.describe_path(0));
  return nullptr;
}

void SendComm::tell_sizes(std::uint32_t index, std::uint32_t group_size) const {
  for (std::uint32_t i = 0; i < group_size; ++i) record_shadow().size[index + i] = requests_[index + i].bytes;
}

// Rings the doorbell for work_ up to `last`, and leaves the entries of work_ as every WRITE of data needs them.
inline void SendComm::post(SendQueue& queue, ibv_send_wr& last) {
  ibv_send_wr* const next = std::exchange(last.next, nullptr);
  ibv_send_wr* refused = nullptr;
  const int returned = ibv_post_send(queue.qp, work_.data(), &refused);
  last.next = next;
  last.opcode = IBV_WR_RDMA_WRITE;
  last.num_sge = 1;
  last.send_flags = 0;
  if (returned != 0) fail_post("ibv_post_send", returned, static_cast<std::size_t>(&queue - queues_.data()));
}

void SendComm::start_posting(std::uint32_t first_member, std::uint32_t group_size) {
  const std::uint32_t index = wire::ring_index(first_member);
  std::uint64_t total = 0;
  bool full = true;
  for (std::uint32_t i = 0; i < group_size; ++i) {
    total += requests_[index + i].bytes;
    full = full && requests_[index + i].bytes == entry(index + i).size;
  }
  if (!full) tell_sizes(index, group_size);
  const auto queues = static_cast<std::uint32_t>(queues_.size());
  posting_ = {};
  posting_.active = true;
  posting_.sizes = full ? wire::SizeSource::kPosted : wire::SizeSource::kRecord;
  posting_.first_member = first_member;
  posting_.group_size = group_size;
  posting_.parts = total >= stripe_threshold_ ? queues : 1;
  posting_.first_queue = next_queue_;
  next_queue_ = (next_queue_ + posting_.parts) % queues;
  requests_[index].group_size = static_cast<std::uint8_t>(group_size);
  requests_[index].parts_left = posting_.parts;
  continue_posting();
}

std::uint64_t SendComm::stripe_begin(std::uint64_t bytes, std::uint32_t part) const {
  const std::uint64_t even = (bytes + posting_.parts - 1) / posting_.parts;
  const std::uint64_t stripe = (even + kStripeAlignBytes - 1) / kStripeAlignBytes * kStripeAlignBytes;
  return std::min(bytes, stripe * part);
}

// Formats the next WRITE of the current part; false when all of its data has been formatted.
bool SendComm::next_piece(const SendQueue& queue, ibv_send_wr& work, ibv_sge& segment) {
  const std::uint32_t first = wire::ring_index(posting_.first_member);
  for (; posting_.member < posting_.group_size; ++posting_.member, posting_.stripe_done = 0) {
    const std::uint32_t index = first + posting_.member;
    const SendRequest& request = requests_[index];
    const std::uint64_t begin = stripe_begin(request.bytes, posting_.part) + posting_.stripe_done;
    const std::uint64_t end = stripe_begin(request.bytes, posting_.part + 1);
    if (begin >= end) continue;
    const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(end - begin, max_piece_bytes_));
    segment = {request.data + begin, bytes, request.memory->lkey[queue.device]};
    work.wr.rdma.remote_addr = entry(index).address + begin;
    work.wr.rdma.rkey = remote_key(index, queue.remote_device);
    posting_.stripe_done += bytes;
    return true;
  }
  return false;
}

// Formats the WRITE that ends a part of a group, with the size record where one is needed. The immediate is the
// caller's.
void SendComm::finish_part(const SendQueue& queue, ibv_send_wr& work, ibv_sge& segment, std::uint32_t index,
                           std::uint32_t group_size, wire::SizeSource sizes) {
  work.num_sge = 0;
  work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  work.send_flags = 0;
  work.wr.rdma.remote_addr = record_address_ + offsetof(wire::SizeRecord, size) + index * sizeof(std::uint64_t);
  work.wr.rdma.rkey = queue.record_rkey;
  if (sizes != wire::SizeSource::kRecord) return;
  const auto bytes = static_cast<std::uint32_t>(group_size * sizeof(std::uint64_t));
  segment = {reinterpret_cast<std::uint64_t>(&record_shadow().size[index]), bytes, control_.lkey(queue.device)};
  work.num_sge = 1;
  if (bytes <= queue.inline_bytes) work.send_flags = IBV_SEND_INLINE;
}

void SendComm::continue_posting() {
  const std::uint32_t index = wire::ring_index(posting_.first_member);
  while (posting_.part < posting_.parts) {
    const std::uint32_t queue_index =
        (posting_.first_queue + posting_.part) % static_cast<std::uint32_t>(queues_.size());
    SendQueue& queue = queues_[queue_index];
    const std::uint32_t room = std::min(kBatch, queue.free);
    std::uint32_t count = 0;
    bool part_done = false;
    while (count < room && !part_done) {
      ibv_send_wr& work = work_[count];
      work.wr_id = encode_wr_id(index, queue_index, 0, false);  // reported only if it fails
      if (!next_piece(queue, work, segments_[count])) {
        const wire::SizeSource sizes = posting_.part == 0 ? posting_.sizes : wire::SizeSource::kElsewhere;
        finish_part(queue, work, segments_[count], index, posting_.group_size, sizes);
        work.imm_data =
            htonl(wire::encode_immediate({index, sizes, posting_.parts, wire::ring_pass(posting_.first_member)}));
        part_done = true;
      }
      ++count;
    }
    if (count == 0) return;  // no room: progress() comes back when completions have made some
    ibv_send_wr& last = work_[count - 1];
    last.send_flags |= IBV_SEND_SIGNALED;
    last.wr_id = encode_wr_id(index, queue_index, count, part_done);
    queue.free -= count;
    post(queue, last);
    if (error() != nullptr) break;
    if (part_done) {
      ++posting_.part;
      posting_.member = 0;
      posting_.stripe_done = 0;
    }
  }
  posting_.active = false;
}

bool SendComm::quiet() const {
  return std::none_of(requests_.begin(), requests_.end(),
                      [](const SendRequest& request) { return request.state == RequestState::kPending; });
}

inline void SendComm::complete(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS) return fail_send(completion);
  const auto index = static_cast<std::uint32_t>(completion.wr_id & 0xffff);
  const auto queue = static_cast<std::uint32_t>(completion.wr_id >> 16 & 0xffff);
  queues_[queue].free += static_cast<std::uint32_t>(completion.wr_id >> 32 & 0xffff);
  if ((completion.wr_id >> 48 & 1) == 0) return;
  SendRequest& first = requests_[index];
  if (--first.parts_left != 0) return;
  for (std::uint32_t i = 0; i < first.group_size; ++i) requests_[index + i].state = RequestState::kDone;
}

void SendComm::progress() {
  const bool all_taken = take_completions([this](const ibv_wc& completion) { complete(completion); });
  if (posting_.active && error() == nullptr) continue_posting();
  if (all_taken) hear_signals(false);
}

[[gnu::cold]] void SendComm::fail_send(const ibv_wc& completion) {
  const auto index = static_cast<std::uint32_t>(completion.wr_id & 0xffff);
  const std::uint32_t members = std::max<std::uint32_t>(requests_[index].group_size, 1);
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < members; ++i) bytes += requests_[index + i].bytes;
  fail_completion(completion, completion.wr_id >> 16 & 0xffff, "sending " + std::to_string(bytes) + " bytes");
}

}  // namespace verbatim
