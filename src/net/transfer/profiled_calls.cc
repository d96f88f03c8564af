// isend and test of comms that give events to NCCL's profiler. isend does not say which QP has taken a message that is
// posted at once: that is the QP whose turn it was. All other parts are noted when they are posted.
#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kNotPolled = ~std::uint64_t{0};  // wr_id of an entry of completions_ without completion

}  // namespace

ErrorKind SendComm::isend_profiled(SendComm& comm, const void* data, std::size_t bytes, int tag,
                                   const MemoryKeys* memory, void* profiler_handle, void** request) noexcept {
  const std::uint64_t first = comm.head_;
  const SendQueue& queue = *comm.turn_->queue;
  const Isend plain = comm.latencies_ != nullptr ? isend_plain<true> : isend_plain<false>;
  const ErrorKind result = plain(comm, data, bytes, tag, memory, nullptr, request);
  if (*request != nullptr) {
    const auto& accepted = static_cast<SendRequest&>(*static_cast<Request*>(*request));
    comm.profiler_events_->keep_handle(static_cast<std::uint32_t>(&accepted - comm.requests_.data()), profiler_handle);
  }
  comm.start_posted(first, queue);
  return result;
}

// Starts the events of what isend has posted: `first` is the head before the call, `queue` the QP
// whose turn it was then.
void SendComm::start_posted(std::uint64_t first, const SendQueue& queue) noexcept {
  const auto members = static_cast<std::uint32_t>(head_ - first);  // of the group that the message has completed
  const std::uint32_t index = wire::ring_index(static_cast<std::uint32_t>(first));
  bool noted = false;
  for (const ProfilerEvents::PostedPart& part : profiler_events_->noted()) noted = noted || part.index == index;
  start_noted();
  if (members == 0 || noted || pending_post_.active || error() != nullptr) return;
  start_events(index, members, {index, {queue.index, kWholeMessage}, encode_send_work(index, queue.index, 0, true)});
}

ErrorKind SendComm::test_profiled(Request& base, int* done, int* sizes) noexcept {
  SendComm& comm = *static_cast<SendComm*>(base.comm);
  for (ibv_wc& completion : comm.completions_) completion.wr_id = kNotPolled;
  const ErrorKind result = comm.latencies_ != nullptr ? test_timed(base, done, sizes) : test(base, done, sizes);
  comm.start_noted();
  comm.stop_completed_parts();
  if (*done == 0) return result;
  const auto& request = static_cast<SendRequest&>(base);
  comm.profiler_events_->stop_all(static_cast<std::uint32_t>(&request - comm.requests_.data()));
  return result;
}

void SendComm::start_noted() noexcept {
  for (const ProfilerEvents::PostedPart& part : profiler_events_->noted()) {
    start_events(part.index, requests_[part.index].group_size, part);
  }
  profiler_events_->clear_noted();
}

// For the members of a group of which a part was posted.
void SendComm::start_events(std::uint32_t first, std::uint32_t members,
                            const ProfilerEvents::PostedPart& part) noexcept {
  const SendQueue& queue = queues_[part.stripe.queue];
  for (std::uint32_t i = 0; i < members; ++i) {
    const std::uint64_t bytes = requests_[first + i].bytes;
    profiler_events_->start(first + i, part.stripe.queue,
                            {.device = queue.device,
                             .wr_id = part.wr_id,
                             .opcode = IBV_WR_RDMA_WRITE,
                             .qp_num = static_cast<int>(queue.qp->qp_num),
                             .bytes = stripe_end(bytes, part.stripe) - stripe_begin(bytes, part.stripe)});
  }
}

// Stops the events of the parts whose completions were polled last. What other polls have found ends with its message.
void SendComm::stop_completed_parts() noexcept {
  for (const ibv_wc& completion : completions_) {
    const auto index = static_cast<std::uint32_t>(completion.wr_id & 0xffff);
    if (completion.wr_id == kNotPolled || completion.status != IBV_WC_SUCCESS || index >= requests_.size()) continue;
    if ((completion.wr_id & (kSendPartDone | kSendSingle)) != kSendPartDone) continue;
    const std::uint32_t members = requests_[index].group_size;
    for (std::uint32_t i = 0; i < members; ++i)
      profiler_events_->stop_queue(index + i, completion.wr_id >> 16 & 0xffff);
  }
}

ErrorKind RecvComm::test_profiled(Request& base, int* done, int* sizes) noexcept {
  const auto& request = static_cast<RecvRequest&>(base);
  RecvComm& comm = *static_cast<RecvComm*>(base.comm);
  const ErrorKind result = comm.latencies_ != nullptr  ? test_timed(base, done, sizes)
                           : comm.arrivals_ != nullptr ? test_atomic(base, done, sizes)
                                                       : test(base, done, sizes);
  if (*done == 0 || request.optional_completion) return result;
  const std::uint32_t index = wire::ring_index(request.first_member);
  for (std::uint32_t i = 0; i < request.group_size; ++i) comm.profiler_events_->stop_all(index + i);
  return result;
}

}  // namespace verbatim
