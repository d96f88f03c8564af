// The sending end's completions: which sends are done, what test reports of them, and what has failed.
#include <algorithm>

#include "net/transfer/send_comm.h"

namespace verbatim {

template class CommProgress<SendComm>;

wire::ConnectionStatus SendComm::status() const {
  wire::ConnectionStatus status{.sends = 1, .members = head(), .bytes = bytes_};
  const std::span<const EndpointQp> ends = endpoint_.qps();
  for (std::size_t i = 0; i < queues_.size(); ++i) status.outstanding += ends[i].send_wr - queues_[i].free;
  status.outstanding -= std::min(status.outstanding, probes_left());
  const std::byte* const entry_address = control_.data() + wire::ring_index(status.members) * entry_bytes_;
  if (ready(entry_address, status.members)) status.flags |= wire::ConnectionStatus::kCtsReady;
  return status;
}

std::optional<std::size_t> SendComm::busiest_qp() const {
  std::optional<std::size_t> busiest;
  std::uint32_t most = 0;
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    const std::uint32_t outstanding = endpoint_.qps()[i].send_wr - queues_[i].free;
    if (outstanding <= most || !works(i)) continue;
    most = outstanding;
    busiest = i;
  }
  return busiest;
}

bool SendComm::all_done() const {
  return std::none_of(requests_.begin(), requests_.end(),
                      [](const SendRequest& request) { return request.state == RequestState::kPending; });
}

// A single message.
inline bool SendComm::complete_simple(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS || (completion.wr_id & kSendSingle) == 0) return false;
  queues_[completion.wr_id >> 16 & 0xffff].free += static_cast<std::uint32_t>(completion.wr_id >> kSendCountShift);
  requests_[completion.wr_id & 0xffff].state = RequestState::kDone;
  return true;
}

void SendComm::complete(const ibv_wc& completion) {
  if (complete_simple(completion)) return;
  if (completion.status != IBV_WC_SUCCESS) return fail_send(completion);
  const std::size_t queue = completion.wr_id >> 16 & 0xffff;
  queues_[queue].free += static_cast<std::uint32_t>(completion.wr_id >> kSendCountShift);
  striping_.complete(queue, static_cast<std::uint32_t>(completion.wr_id >> kSendLoadShift) & kSendLoadMask);
  if ((completion.wr_id & kSendPartDone) == 0) {
    if ((completion.wr_id & kSendProbe) != 0) probe_answered();
    if ((completion.wr_id & 0xffff) == kSendPing) ping_answered(queue);
    return;
  }
  if (!logs_.empty()) logs_[queue].complete();
  part_finished(requests_[completion.wr_id & 0xffff]);
}

ErrorKind SendComm::test(Request& base, int* done, int* sizes) noexcept {
  return test_request<false>(static_cast<SendRequest&>(base), done, sizes);
}

ErrorKind SendComm::test_timed(Request& base, int* done, int* sizes) noexcept {
  return test_request<true>(static_cast<SendRequest&>(base), done, sizes);
}

template <bool kTimed>
inline ErrorKind SendComm::retire(SendRequest& request, int* done, int* sizes) noexcept {
  if constexpr (kTimed) {
    const SendComm& comm = *static_cast<SendComm*>(request.comm);
    comm.latencies_->done(static_cast<std::uint32_t>(&request - comm.requests_.data()));
  }
  *done = 1;
  request.state = RequestState::kFree;
  if (sizes != nullptr) *sizes = narrow(request.bytes);
  return ErrorKind::kNone;
}

CompletedCounts SendComm::completed_counts() const {
  CompletedCounts completed_counts{head_, bytes_, head_ != 0 || ready(head_entry_, static_cast<std::uint32_t>(head_))};
  // Members of a group that has not been posted are in neither number.
  const SendRequest* const unsent = &requests_[group_.index];
  const SendRequest* const unsent_end = unsent + (group_.open_members != 0 ? group_.group_size : 0);
  for (const SendRequest& request : requests_) {
    if (request.state != RequestState::kPending || (&request >= unsent && &request < unsent_end)) continue;
    --completed_counts.messages;
    completed_counts.bytes -= request.bytes;
  }
  return completed_counts;
}

// The completion does not say which buffer of a group was refused. The first that is not registered, else the first of
// a GPU, else the first.
RefusedBuffer SendComm::refused_buffer(const SendRequest* first, std::uint32_t members, const Device& device) {
  RefusedBuffer found;
  for (std::uint32_t i = 0; i < members; ++i) {
    if (first[i].bytes == 0) continue;  // needs no registration
    RefusedBuffer buffer{reinterpret_cast<std::uintptr_t>(first[i].data), first[i].bytes, std::nullopt};
    buffer.region = device.mr_cache().find(buffer.address, buffer.bytes);
    if (!buffer.region) return buffer;
    const bool gpu = buffer.region->type != MemoryType::kHost;
    if (!found.region || (gpu && found.region->type == MemoryType::kHost)) found = buffer;
  }
  return found;
}

void SendComm::fail_send(const ibv_wc& completion) {
  const std::size_t queue = completion.wr_id >> 16 & 0xffff;
  const bool probe = (completion.wr_id & kSendProbe) != 0;
  if (is_of_earlier_qp(completion, queue)) return;
  const auto index = static_cast<std::uint32_t>(completion.wr_id & 0xffff);
  const bool ping = index == kSendPing;
  const bool single = (completion.wr_id & kSendSingle) != 0;
  const std::uint32_t members = ping ? 0 : single ? 1 : requests_[index].group_size;
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < members; ++i) bytes += requests_[index + i].bytes;
  FailedWork work{.operation_text = "sending", .bytes = bytes};
  if (probe || ping) work = kProbeWork;
  if (lane_failed(completion, queue, [&] { return work; })) {
    auto freed = static_cast<std::uint32_t>(completion.wr_id >> kSendCountShift);
    // The data of a message whose signal is a work request of its own: that frees the entries of both.
    if (single && freed == 1 && bytes >= single_limit_bytes_) freed = 0;
    queues_[queue].free += freed;
    striping_.complete(queue, static_cast<std::uint32_t>(completion.wr_id >> kSendLoadShift) & kSendLoadMask);
    if (probe) probe_dropped();
    if (ping) ping_answered(queue);
    return;
  }
  if (probe) return fail_completion(completion, queue, work);
  if (completion.status == IBV_WC_LOC_PROT_ERR) {
    work.buffer = refused_buffer(&requests_[index], members, *endpoint_.ports()[queues_[queue].device]->device);
  }
  fail_completion(completion, queue, work);
}

bool SendComm::fail_invalid_cts() {
  fail(ErrorKind::kRemote, "CTS", 0, diagnose_corrupt_peer, [&] {
    return "the peer announced a group of " + std::to_string(entry(wire::ring_index(head())).size.group_size()) +
           " receives (CTS), 1 to " + std::to_string(wire::kMaxGroup) + " are possible";
  });
  return false;
}

ErrorKind SendComm::fail_size_mismatch(std::size_t bytes, const wire::CtsEntry& entry_head) noexcept {
  fail(ErrorKind::kUsage, "isend", 0, diagnose_size_mismatch, [&] {
    return "isend of " + std::to_string(bytes) + " bytes with tag " + std::to_string(entry_head.tag) +
           " is more than the peer's receive holds, " + std::to_string(entry_head.size.bytes()) + " bytes";
  });
  return result();
}

}  // namespace verbatim
