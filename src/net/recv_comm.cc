#include "net/recv_comm.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "net/net.h"

namespace verbatim {
namespace {

constexpr std::uint32_t kCtsQueueDepth = 128;
// Every so many CTS one is signalled, so that the queue learns what has left; a quarter of a shallow queue.
constexpr std::uint32_t kCtsSignalInterval = 32;
constexpr std::uint32_t kInlineBytes = 2 * sizeof(wire::CtsEntry);

constexpr std::uint32_t kFirstReceiveTarget = 32;
// A receive for every group that can be in flight, and the batch that is being used up.
constexpr std::uint32_t kMaxReceiveTarget = wire::kMaxInFlight + 16;

// wr_id: bits 0-15 queue, 16-31 what it is, 32-47 how many CTS are done with it. Flushes carry kFlushWorkBit.
constexpr std::uint64_t kReceiveWork = std::uint64_t{1} << 16;
constexpr std::uint64_t kCtsWork = std::uint64_t{2} << 16;

}  // namespace

EndpointSizes RecvComm::endpoint_sizes(std::size_t qps) {
  EndpointSizes sizes;
  sizes.qps = qps;
  sizes.caps = {.send_wr = kCtsQueueDepth, .recv_wr = kMaxReceiveTarget, .inline_bytes = kInlineBytes};
  sizes.extra_completions = FlushQueue::kSlots;
  return sizes;
}

Result<std::unique_ptr<RecvComm>> RecvComm::create(Context& context, Endpoint endpoint) {
  Result<ControlMemory> control =
      ControlMemory::create(endpoint.ports(), wire::cts_ring_bytes(endpoint.ports().size()) + sizeof(wire::SizeRecord));
  if (!control) return control.error();
  return std::unique_ptr<RecvComm>(new RecvComm(context, std::move(endpoint), std::move(*control)));
}

RecvComm::RecvComm(Context& context, Endpoint endpoint, ControlMemory control)
    : Comm(CommKind::kRecv, context, std::move(endpoint), std::move(control)),
      entry_bytes_(wire::cts_entry_bytes(endpoint_.ports().size())) {
  static_assert(kMaxReceiveTarget >= wire::kMaxInFlight + kReceiveBatch && kMaxReceiveTarget % kReceiveBatch == 0);
  for (std::size_t i = 0; i + 1 < receive_chain_.size(); ++i) receive_chain_[i].next = &receive_chain_[i + 1];
  for (RecvRequest& request : requests_) {
    request.comm = this;
    request.kind = RequestKind::kRecv;
  }
}

Status RecvComm::connect(const wire::Hello& remote, int traffic_class) {
  // Before RTR: from then on the sender may write.
  for (const EndpointQp& end : endpoint_.qps()) queues_.push_back({end.qp.get(), 0});
  for (const EndpointQp& end : endpoint_.qps()) most_receives_ = std::min(most_receives_, end.recv_wr);
  most_receives_ -= most_receives_ % kReceiveBatch;
  if (most_receives_ == 0) return Error{ErrorKind::kUsage, 0, "a device with too few receives to a QP"};
  receive_target_ = std::min(kFirstReceiveTarget, most_receives_);
  for (std::size_t i = 0; i < queues_.size(); ++i) post_receives(i);
  if (error() != nullptr) return *error();
  if (const Status connected = endpoint_.connect(remote, context_.config(), traffic_class); !connected)
    return connected;
  const EndpointQp& first = endpoint_.qps()[0];
  ring_address_ = remote.control_address;
  ring_rkey_ = remote.devices[first.remote_device].control_rkey;
  cts_free_ = first.send_wr;
  cts_signal_interval_ = std::clamp(first.send_wr / 4, 1U, kCtsSignalInterval);
  cts_segment_.lkey = control_.lkey(first.device);
  cts_work_.sg_list = &cts_segment_;
  cts_work_.num_sge = 1;
  cts_work_.opcode = IBV_WR_RDMA_WRITE;
  cts_work_.wr.rdma.rkey = ring_rkey_;
  return {};
}

Result<std::unique_ptr<MemoryHandle>> RecvComm::register_memory(const MrRequest& request) {
  if (request.type != MemoryType::kHost) {
    if (const Status prepared = prepare_flush(); !prepared) return prepared.error();
  }
  return Comm::register_memory(request);
}

Status RecvComm::prepare_flush() {
  Status prepared = flush_.prepare(*this, endpoint_, context_.config());
  if (!prepared) {
    VERBATIM_WARN("%s for flushes of GPU memory failed with %s on %s", prepared.error().operation,
                  std::strerror(prepared.error().sys_errno), endpoint_.describe_path(0).c_str());
  }
  return prepared;
}

wire::SizeRecord& RecvComm::records() const {
  return *reinterpret_cast<wire::SizeRecord*>(control_.data() + entry_bytes_ * wire::kRingEntries);
}

// Fills the QP up to the target, a batch at a time.
void RecvComm::post_receives(std::size_t queue) {
  while (queues_[queue].posted + kReceiveBatch <= receive_target_) {
    for (ibv_recv_wr& work : receive_chain_) work.wr_id = kReceiveWork | queue;
    ibv_recv_wr* refused = nullptr;
    const int returned = ibv_post_recv(queues_[queue].qp, receive_chain_.data(), &refused);
    if (returned != 0) return fail_post("ibv_post_recv", returned, queue);
    queues_[queue].posted += kReceiveBatch;
  }
}

// Whether a group of this size finds request slots, room for its CTS, and a receive on every QP.
inline bool RecvComm::make_room(std::uint32_t group_size) {
  if (next_member_ - oldest_member_ + group_size > wire::kMaxInFlight) return false;
  if (cts_free_ == 0) {
    progress();
    if (cts_free_ == 0) return false;
  }
  if (groups_in_flight_ + kReceiveBatch >= receive_target_ && receive_target_ < most_receives_) {
    receive_target_ = std::min(2 * receive_target_, most_receives_);
    for (std::size_t i = 0; i < queues_.size(); ++i) post_receives(i);
  }
  // Where the device's queues are too shallow for all that may be in flight, fewer groups are.
  if (groups_in_flight_ + kReceiveBatch > most_receives_) return false;
  return error() == nullptr;
}

// Registered through another comm (regIsGlobal): this one hears of device memory only now.
[[gnu::cold]] bool RecvComm::can_flush() {
  if (prepare_flush()) return true;
  fail(ErrorKind::kSystem, "irecv", "no flush QP for GPU memory on " + endpoint_.describe_path(0));
  return false;
}

inline void RecvComm::write_entry(std::uint32_t index, std::uint32_t member, std::uint8_t group_size,
                                  const RecvBuffer& buffer) const {
  wire::CtsHead head{};
  head.address = reinterpret_cast<std::uint64_t>(buffer.data);
  head.size = buffer.bytes;
  head.tag = static_cast<std::uint32_t>(buffer.tag);
  head.group_size = group_size;
  if (entry_bytes_ == sizeof(wire::CtsEntry)) {
    auto& out = *reinterpret_cast<wire::CtsEntry*>(entry(index));
    out.head = head;
    out.rkey = buffer.memory->rkey[0];
    out.ready = member + 1;
    return;
  }
  auto& out = *reinterpret_cast<wire::CtsWideEntry*>(entry(index));
  out.head = head;
  std::copy(std::begin(buffer.memory->rkey), std::end(buffer.memory->rkey), std::begin(out.rkey));
  out.ready = member + 1;
}

inline void RecvComm::post_cts(std::uint32_t first_member, std::uint32_t group_size) {
  const std::uint32_t index = wire::ring_index(first_member);
  const EndpointQp& end = endpoint_.qps()[0];
  cts_segment_.addr = reinterpret_cast<std::uint64_t>(entry(index));
  cts_segment_.length = static_cast<std::uint32_t>(group_size * entry_bytes_);
  cts_work_.wr.rdma.remote_addr = ring_address_ + index * entry_bytes_;
  cts_work_.send_flags = cts_segment_.length <= end.inline_bytes ? unsigned{IBV_SEND_INLINE} : 0U;
  cts_work_.wr_id = kCtsWork;
  --cts_free_;
  if (++cts_unsignalled_ >= cts_signal_interval_) {
    cts_work_.send_flags |= IBV_SEND_SIGNALED;
    cts_work_.wr_id |= std::uint64_t{cts_unsignalled_} << 32;
    cts_unsignalled_ = 0;
  }
  ibv_send_wr* refused = nullptr;
  const int returned = ibv_post_send(end.qp.get(), &cts_work_, &refused);
  if (returned != 0) fail_post("ibv_post_send", returned, 0);
}

Request* RecvComm::irecv(std::span<const RecvBuffer> buffers) {
  if (error() != nullptr) return nullptr;
  const auto group_size = static_cast<std::uint32_t>(buffers.size());
  if (!make_room(group_size)) return nullptr;
  const std::uint32_t first = next_member_;
  const std::uint32_t index = wire::ring_index(first);
  for (std::uint32_t i = 0; i < group_size; ++i) {
    if (buffers[i].memory->device_memory && !flush_.prepared() && !can_flush()) return nullptr;
    write_entry(index + i, first + i, static_cast<std::uint8_t>(group_size), buffers[i]);
    posted_[index + i] = buffers[i].bytes;
  }
  RecvRequest& request = requests_[index];
  request.state = RequestState::kPending;
  request.group_size = static_cast<std::uint8_t>(group_size);
  request.sizes = wire::SizeSource::kPosted;
  request.parts_seen = 0;
  request.first_member = first;
  request.bytes_counted = 0;
  next_member_ += group_size;
  ++groups_in_flight_;
  post_cts(first, group_size);
  return &request;
}

Request* RecvComm::iflush(const void* data, const MemoryKeys& memory) {
  if (error() != nullptr || !memory.device_memory) return nullptr;
  if (!flush_.prepared()) {
    fail(ErrorKind::kArgument, "iflush",
         "iflush of a buffer that nothing was received into: " + endpoint_.describe_path(0));
    return nullptr;
  }
  int returned = 0;
  Request* request = flush_.post(data, memory, returned);
  if (request == nullptr) {
    if (returned != 0) {
      fail_post("ibv_post_send", returned, 0);
    } else {
      fail(ErrorKind::kInternal, "iflush", "more flushes outstanding than receives on " + endpoint_.describe_path(0));
    }
  }
  return request;
}

bool RecvComm::quiet() const {
  return groups_in_flight_ == 0 && flush_.quiet();
}

inline void RecvComm::arrived(const ibv_wc& completion, std::size_t queue) {
  if (--queues_[queue].posted + kReceiveBatch <= receive_target_) post_receives(queue);
  const wire::Immediate immediate = wire::decode_immediate(ntohl(completion.imm_data));
  RecvRequest& request = requests_[immediate.entry];
  if (request.state != RequestState::kPending || immediate.pass != wire::ring_pass(request.first_member)) {
    return refuse_immediate(queue);
  }
  if (immediate.sizes == wire::SizeSource::kByteCount) {
    if (request.group_size != 1) return refuse_immediate(queue);
    request.bytes_counted += completion.byte_len;
  }
  if (immediate.sizes != wire::SizeSource::kElsewhere) request.sizes = immediate.sizes;
  if (++request.parts_seen < immediate.parts) return;
  request.state = RequestState::kDone;
  --groups_in_flight_;
}

inline void RecvComm::complete(const ibv_wc& completion) {
  const auto queue = static_cast<std::size_t>(completion.wr_id & 0xffff);
  if ((completion.wr_id & kFlushWorkBit) != 0) {
    if (completion.status != IBV_WC_SUCCESS) return fail_completion(completion, 0, "flushing a GPU buffer");
    return flush_.complete(static_cast<std::uint32_t>(completion.wr_id & 0xffff));
  }
  if ((completion.wr_id & kReceiveWork) != 0) {
    if (completion.status != IBV_WC_SUCCESS) return fail_completion(completion, queue, "receiving");
    return arrived(completion, queue);
  }
  if (completion.status != IBV_WC_SUCCESS)
    return fail_completion(completion, queue, "announcing a receive buffer (CTS)");
  cts_free_ += static_cast<std::uint32_t>(completion.wr_id >> 32 & 0xffff);
}

void RecvComm::progress() {
  const bool all_taken = take_completions([this](const ibv_wc& completion) { complete(completion); });
  if (all_taken) hear_signals(false);
}

[[gnu::cold]] void RecvComm::refuse_immediate(std::size_t queue) {
  fail(ErrorKind::kRemote, "immediate",
       "the peer completed a receive that is not posted: " + endpoint_.describe_path(queue));
}

[[gnu::cold]] std::uint64_t RecvComm::refuse_size(std::uint64_t posted) {
  fail(ErrorKind::kRemote, "completion record",
       "the peer reports more bytes than were posted: " + endpoint_.describe_path(0));
  return posted;
}

std::uint32_t RecvComm::retire_recv(Request& base, std::span<std::uint64_t, wire::kMaxGroup> sizes) {
  auto& request = static_cast<RecvRequest&>(base);
  const std::uint32_t group_size = request.group_size;
  const std::uint32_t index = wire::ring_index(request.first_member);
  // Sizes that lie elsewhere than with the peer's word are those of the receive itself.
  const std::uint64_t* const told = request.sizes == wire::SizeSource::kByteCount ? &request.bytes_counted
                                    : request.sizes == wire::SizeSource::kRecord  ? &records().size[index]
                                                                                  : nullptr;
  for (std::uint32_t i = 0; i < group_size; ++i) {
    const std::uint64_t posted = posted_[index + i];
    const std::uint64_t size = told != nullptr ? told[i] : posted;
    sizes[i] = size <= posted ? size : refuse_size(posted);
  }
  request.state = RequestState::kFree;
  // In order, as NCCL does it, this goes one step a call.
  while (oldest_member_ != next_member_) {
    const RecvRequest& oldest = requests_[wire::ring_index(oldest_member_)];
    if (oldest.state != RequestState::kFree) break;
    oldest_member_ += oldest.group_size;
  }
  return group_size;
}

}  // namespace verbatim
