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
constexpr int kPollBatch = 8;
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

Result<std::unique_ptr<SendComm>> SendComm::create(Context& context, std::vector<const Port*> ports,
                                                   std::size_t remote_devices) {
  const Config& config = context.config();
  Result<ControlMemory> control = ControlMemory::create(ports, control_bytes(remote_devices));
  if (!control) return control.error();
  EndpointSizes sizes;
  sizes.qps = std::min(config.qps_per_connection * ports.size(), wire::kMaxQps);
  sizes.caps.send_wr = kSendQueueDepth;
  sizes.caps.recv_wr = 1;  // nothing is received here, but not every device takes 0
  sizes.caps.inline_bytes = kInlineBytes;
  Result<Endpoint> endpoint = Endpoint::create(std::move(ports), sizes, config);
  if (!endpoint) return endpoint.error();
  return std::unique_ptr<SendComm>(new SendComm(context, std::move(*endpoint), std::move(*control), remote_devices));
}

SendComm::SendComm(Context& context, Endpoint endpoint, ControlMemory control, std::size_t remote_devices)
    : Comm(CommKind::kSend, context, std::move(endpoint), std::move(control)),
      entry_bytes_(wire::cts_entry_bytes(remote_devices)),
      ready_offset_(entry_bytes_ - sizeof(std::uint32_t)) {
  for (std::uint32_t i = 0; i < kBatch; ++i) {
    work_[i].sg_list = &segments_[i];
    work_[i].next = i + 1 < kBatch ? &work_[i + 1] : nullptr;
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
  return {};
}

bool SendComm::ready(std::uint32_t index, std::uint32_t member) const {
  auto* word = reinterpret_cast<std::uint32_t*>(control_.data() + index * entry_bytes_ + ready_offset_);
  // Pairs with the device's write of the entry: what lies before `ready` is read after it.
  return std::atomic_ref<std::uint32_t>(*word).load(std::memory_order_acquire) == member + 1;
}

std::uint32_t SendComm::remote_key(std::uint32_t index, std::size_t remote_device) const {
  const std::byte* keys = control_.data() + index * entry_bytes_ + sizeof(wire::CtsHead);
  return reinterpret_cast<const std::uint32_t*>(keys)[remote_device];
}

wire::SizeRecord& SendComm::record_shadow() const {
  return *reinterpret_cast<wire::SizeRecord*>(control_.data() + entry_bytes_ * wire::kRingEntries);
}

Request* SendComm::isend(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory) {
  const std::uint32_t head_index = wire::ring_index(head_);
  if (!ready(head_index, head_)) {
    hear_signals(true);
    return nullptr;
  }
  if (error() != nullptr) return nullptr;
  if (posting_.active) {
    progress();
    if (posting_.active) return nullptr;
  }
  const std::uint32_t group_size = entry(head_index).group_size;
  if (group_size - 1 >= wire::kMaxGroup) return refuse_entry();
  const std::uint32_t all = (1U << group_size) - 1;
  for (std::uint32_t open = all & ~matching_.members; open != 0; open &= open - 1) {
    const auto i = static_cast<std::uint32_t>(std::countr_zero(open));
    const std::uint32_t index = head_index + i;
    if (!ready(index, head_ + i)) return nullptr;
    const wire::CtsHead& wanted = entry(index);
    if (wanted.tag != static_cast<std::uint32_t>(tag)) continue;

    SendRequest& request = requests_[index];
    if (request.state != RequestState::kFree) return nullptr;  // a full round of requests that nobody has tested
    if (bytes > wanted.size) return refuse_size(bytes, tag, wanted.size);
    request.state = RequestState::kPending;
    request.memory = &memory;
    request.data = reinterpret_cast<std::uint64_t>(data);
    request.bytes = bytes;
    if (group_size == 1) {
      if (!post_single(request, wanted)) start_posting(head_, 1);
      ++head_;
      return &request;
    }
    match(request, wanted, index);
    matching_.members |= 1U << i;
    if (matching_.members == all) {
      if (!post_simple(group_size)) start_posting(head_, group_size);
      head_ += group_size;
      matching_ = {};
    }
    return &request;
  }
  return nullptr;
}

[[gnu::cold]] Request* SendComm::refuse_entry() {
  fail(ErrorKind::kRemote, "CTS", "the peer wrote an impossible CTS entry: " + endpoint_.describe_path(0));
  return nullptr;
}

[[gnu::cold]] Request* SendComm::refuse_size(std::size_t bytes, int tag, std::size_t room) {
  fail(ErrorKind::kUsage, "isend",
       "isend of " + std::to_string(bytes) + " bytes, but the receive posted for tag " + std::to_string(tag) +
           " holds " + std::to_string(room) + ": sender and receiver disagree on the count, " +
           endpoint_.describe_path(0));
  return nullptr;
}

// Rings the doorbell for work_ up to `last`, which is signalled and tells the others' end.
void SendComm::post(SendQueue& queue, ibv_send_wr& last) {
  ibv_send_wr* const next = std::exchange(last.next, nullptr);
  ibv_send_wr* refused = nullptr;
  const int returned = ibv_post_send(queue.qp, work_.data(), &refused);
  last.next = next;
  if (returned != 0) fail_post("ibv_post_send", returned, static_cast<std::size_t>(&queue - queues_.data()));
}

// The common case, one work request: false when this message needs the long way.
bool SendComm::post_single(SendRequest& request, const wire::CtsHead& wanted) {
  const std::uint32_t used = next_queue_;
  SendQueue& queue = queues_[used];
  if (request.bytes > max_piece_bytes_ || request.bytes >= stripe_threshold_ || queue.free == 0 ||
      separates_completion(request.bytes)) {
    return false;
  }
  const std::uint32_t index = wire::ring_index(head_);
  request.group_size = 1;
  request.parts_left = 1;
  ibv_send_wr& work = work_[0];
  segments_[0] = {request.data, static_cast<std::uint32_t>(request.bytes), request.memory->lkey[queue.device]};
  work.wr_id = encode_wr_id(index, used, 1, true);
  work.num_sge = request.bytes != 0 ? 1 : 0;
  work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  work.send_flags = IBV_SEND_SIGNALED;
  work.imm_data = htonl(wire::encode_immediate({index, wire::SizeSource::kByteCount, 1, wire::ring_pass(head_)}));
  work.wr.rdma.remote_addr = wanted.address;
  work.wr.rdma.rkey = remote_key(index, queue.remote_device);
  --queue.free;
  next_queue_ = used + 1 == queues_.size() ? 0 : used + 1;
  post(queue, work);
  return true;
}

// Takes a member of a group in, and formats its WRITE.
void SendComm::match(SendRequest& request, const wire::CtsHead& wanted, std::uint32_t index) {
  matching_.bytes += request.bytes;
  matching_.full = matching_.full && request.bytes == wanted.size;
  matching_.simple = matching_.simple && request.bytes <= max_piece_bytes_;
  record_shadow().size[index] = request.bytes;
  if (request.bytes == 0) return;
  const SendQueue& queue = queues_[next_queue_];
  ibv_send_wr& work = work_[matching_.formatted];
  segments_[matching_.formatted++] = {request.data, static_cast<std::uint32_t>(request.bytes),
                                      request.memory->lkey[queue.device]};
  work.wr_id = encode_wr_id(wire::ring_index(head_), next_queue_, 0, false);  // reported only if it fails
  work.num_sge = 1;
  work.opcode = IBV_WR_RDMA_WRITE;
  work.send_flags = 0;
  work.wr.rdma.remote_addr = wanted.address;
  work.wr.rdma.rkey = remote_key(index, queue.remote_device);
}

// The common case of a complete group: false when it needs the long way.
bool SendComm::post_simple(std::uint32_t group_size) {
  const std::uint32_t used = next_queue_;
  SendQueue& queue = queues_[used];
  if (!matching_.simple || matching_.bytes >= stripe_threshold_ || queue.free <= matching_.formatted) return false;
  const std::uint32_t index = wire::ring_index(head_);
  SendRequest& first = requests_[index];
  first.group_size = static_cast<std::uint8_t>(group_size);
  first.parts_left = 1;
  std::uint32_t count = matching_.formatted;
  // The last WRITE carries the immediate itself, unless the sizes have to be told or the data may come out of order.
  const wire::SizeSource sizes = matching_.full ? wire::SizeSource::kPosted : wire::SizeSource::kRecord;
  const bool rides = matching_.full && count != 0 && !separates_completion(matching_.bytes);
  ibv_send_wr& last = work_[rides ? count - 1 : count++];
  if (rides) {
    last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  } else {
    finish_part(queue, last, segments_[count - 1], index, group_size, sizes);
  }
  last.imm_data = htonl(wire::encode_immediate({index, sizes, 1, wire::ring_pass(head_)}));
  last.send_flags |= IBV_SEND_SIGNALED;
  last.wr_id = encode_wr_id(index, used, count, true);
  queue.free -= count;
  next_queue_ = used + 1 == queues_.size() ? 0 : used + 1;
  post(queue, last);
  return true;
}

void SendComm::start_posting(std::uint32_t first_member, std::uint32_t group_size) {
  const std::uint32_t index = wire::ring_index(first_member);
  std::uint64_t total = 0;
  bool full = true;
  for (std::uint32_t i = 0; i < group_size; ++i) {
    total += requests_[index + i].bytes;
    full = full && requests_[index + i].bytes == entry(index + i).size;
    record_shadow().size[index + i] = requests_[index + i].bytes;
  }
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
    work.num_sge = 1;
    work.opcode = IBV_WR_RDMA_WRITE;
    work.send_flags = 0;
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

void SendComm::progress() {
  for (const UniqueCq& cq : endpoint_.cqs()) {
    ibv_wc completions[kPollBatch];
    const int count = ibv_poll_cq(cq.get(), kPollBatch, completions);
    for (int i = 0; i < count; ++i) complete(completions[i]);
    if (count < 0) fail(ErrorKind::kSystem, "ibv_poll_cq", "ibv_poll_cq failed on " + endpoint_.describe_path(0));
  }
  if (posting_.active && error() == nullptr) continue_posting();
  hear_signals(false);
}

void SendComm::complete(const ibv_wc& completion) {
  const auto index = static_cast<std::uint32_t>(completion.wr_id & 0xffff);
  const auto queue = static_cast<std::uint32_t>(completion.wr_id >> 16 & 0xffff);
  if (completion.status != IBV_WC_SUCCESS) {
    const std::uint32_t members = std::max<std::uint32_t>(requests_[index].group_size, 1);
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < members; ++i) bytes += requests_[index + i].bytes;
    fail_completion(completion, queue, "sending " + std::to_string(bytes) + " bytes");
    return;
  }
  queues_[queue].free += static_cast<std::uint32_t>(completion.wr_id >> 32 & 0xffff);
  if ((completion.wr_id >> 48 & 1) == 0) return;
  SendRequest& first = requests_[index];
  if (--first.parts_left != 0) return;
  for (std::uint32_t i = 0; i < first.group_size; ++i) requests_[index + i].state = RequestState::kDone;
}

}  // namespace verbatim
