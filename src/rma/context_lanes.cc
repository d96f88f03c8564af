// A set with several lanes: what is posted is remembered until it is acknowledged, and posted on another lane when its
// lane has failed. A put may be executed twice: the same bytes, before a signal has announced them. A signal must
// not: the PSN that the peer's QP expects says whether it was executed. Everything in front of the last executed signal
// was executed too, because the peer executes in order. Everything behind it is posted again, so that a signal and the
// puts in front of it use one lane.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "net/transfer/lane_renewal.h"
#include "rma/context_posting.h"
#include "rma/failover.h"
#include "verbs/qp.h"
#include "wire/rma.h"

namespace verbatim::rma {

std::uint32_t ContextSet::rank_of(const PeerQueue& queue) const {
  return is_own(queue.peer) ? own_rank() : path_of(queue).rank;
}

ibv_mtu ContextSet::lane_mtu(const PeerQueue& queue, std::uint32_t lane) const {
  return is_own(queue.peer) ? lane_port(lane).active_mtu : path_of(queue).lanes[lane].connection.path.mtu;
}

void ContextSet::set_lane_keys(WorkRequest& work, const PeerQueue& queue, const Operation& operation,
                               bool signal) const {
  const std::uint32_t lane = queue.lane.load(std::memory_order_relaxed);
  const std::uint32_t rank = rank_of(queue);
  work.segment.lkey = signal || operation.local_memory == nullptr ? parts_.scratch.lkey(lane % parts_.ports.size())
                                                                  : operation.local_memory->lkey_of(lane);
  if (signal) {
    work.request.wr.atomic.rkey = operation.signal_memory->rkey_of(rank, lane);
  } else if (operation.remote_memory != nullptr) {
    work.request.wr.rdma.rkey = operation.remote_memory->rkey_of(rank, lane);
  }
}

// The end of a lane is not the end of the communicator.
bool ContextSet::is_end_of_lane(const ibv_wc& completion) noexcept {
  if (failover_ == nullptr || failures().has_failed()) return false;
  const std::uint64_t id = completion.wr_id;
  if (WorkId::is_probe(id)) {
    complete_of_lanes(id, false);
    return true;
  }
  PeerQueue& queue = *request_of(id).queue;
  const std::uint32_t lane = WorkId::lane_of_flush(id).value_or(queue.lane.load(std::memory_order_relaxed));
  // rxe refuses to send while the link is down, instead of retrying.
  const bool path = completion.status == IBV_WC_RETRY_EXC_ERR || completion.status == IBV_WC_WR_FLUSH_ERR ||
                    completion.status == IBV_WC_RESP_TIMEOUT_ERR ||
                    (completion.status == IBV_WC_LOC_QP_OP_ERR &&
                     (!failover_->is_used(queue.peer, lane) || link_goes_down(lane_port(lane))));
  // The first one of a QP has another status, except where the other end has moved its QP to ERR.
  const bool flushed = completion.status == IBV_WC_WR_FLUSH_ERR;
  const char* const why =
      flushed ? "its QP is in ERR" : lane_port(lane).device->verbs().wc_status_str(completion.status);
  const char* const next =
      flushed ? "look at the log of the other end: an error there is the cause" : Failover::kLookAtPorts;
  if (!path ||
      !failover_->lane_failed(queue.peer, lane, flushed ? Failover::Last::kKeep : Failover::Last::kLeave, why, next))
    return false;
  if (WorkId::is_flush(id)) {
    complete_of_lanes(id, false);
  } else {
    queue.sent->add_flushed();
  }
  return true;
}

void ContextSet::complete_of_lanes(std::uint64_t id, bool works) noexcept {
  const std::uint32_t lane = WorkId::lane(id);
  if (WorkId::is_probe(id)) return failover_->probe_ended(WorkId::peer(id), lane, works);
  Request& request = queues_[WorkId::context(id) * queues_per_context_ + paths_.size()].slots[WorkId::slot(id)];
  --flushes_under_way_[lane];
  --request.posted;
  if (!works) begin_reads(request, 1U << lane);  // it has flushed nothing
  if (request.posted == 0 && request.unread == 0) end_operation(request);
}

// A put to oneself is a flush, too (NCCL's rma_proxy_progress.cc), and has covered one port.
bool ContextSet::becomes_flush(Request& request) noexcept {
  const Memory* const memory = request.operation.remote_memory;
  if (request.work.kind != OperationKind::kPut || memory == nullptr || !memory->device_memory) return false;
  request.work.kind = OperationKind::kFlush;
  request.bytes = 1;
  request.posted = 0;
  ++request.queue->counts.begun[static_cast<std::size_t>(OperationKind::kFlush)];
  begin_reads(request, (1U << parts_.ports.size()) - 1);
  return true;
}

void ContextSet::begin_reads(Request& request, std::uint32_t ports) noexcept {
  if (request.unread == 0) request.next = std::exchange(unread_, &request);
  request.unread |= ports;
}

void ContextSet::post_reads() noexcept {
  Request* waiting = std::exchange(unread_, nullptr);
  while (waiting != nullptr && !failures().has_failed()) {
    Request& request = *waiting;
    waiting = request.next;
    for (std::uint32_t port = 0; port < parts_.ports.size(); ++port) {
      if ((request.unread >> port & 1) != 0 && post_read(request, port)) request.unread &= ~(1U << port);
    }
    if (request.unread != 0) request.next = std::exchange(unread_, &request);
    if (request.unread == 0 && request.posted == 0) end_operation(request);
  }
}

// False: not yet. Without the lane to oneself it waits until no peer writes over the port.
bool ContextSet::post_read(Request& request, std::uint32_t port) noexcept {
  if (!failover_->is_used(request.queue->peer, port)) return !failover_->is_open(port);
  if (flushes_under_way_[port] >= flush_work_) return false;
  WorkRequest work;
  work.request.sg_list = &work.segment;
  work.request.num_sge = 1;
  const Operation read{.local = parts_.scratch.address(),
                       .remote = request.operation.remote,
                       .bytes = 1,
                       .lkey = parts_.scratch.lkey(port),
                       .rkey = request.operation.remote_memory->rkey_of(own_rank(), port)};
  const std::uint32_t context = request.queue->context;
  const auto index = static_cast<std::uint32_t>(&request - request.queue->slots.data());
  fill_transfer(work, read, IBV_WR_RDMA_READ, WorkId::make_flush(context, index, port), IBV_SEND_SIGNALED);
  const int returned = post_send(flush_qp(port), work.request);
  if (returned != 0) fail_post(*request.queue, returned);  // nothing completes any more
  ++flushes_under_way_[port];
  ++request.posted;
  return true;
}

bool ContextSet::find_lane(PeerQueue& queue) const noexcept {
  const std::uint32_t lane = queue.lane.load(std::memory_order_relaxed);
  const std::uint32_t wanted = failover_->lane_for(queue.peer);
  if (wanted == lane && !queue.left_lane) return true;
  // It goes to another lane behind a signal, so that a signal and the puts in front of it use one lane. If that lane
  // has failed, it posts nothing until leave_lane has left it: then the peer holds back no bytes of these puts.
  if (!queue.left_lane && queue.sent->ends_with_put()) return failover_->is_used(queue.peer, lane);
  if (wanted == kNoLane || (!queue.left_lane && queue.sent->size() != 0)) return false;
  const std::optional<std::uint32_t> psn = failover_->enter(queue.peer, wanted, queue.context);
  if (!psn) return false;
  if (queue.context == 0) {  // the others follow
    VERBATIM_INFO("RMA from rank %u to rank %u uses lane %u of %zu (%s)", own_rank(), rank_of(queue), wanted + 1,
                  queue.further_qps.size() + 1, lane_port(wanted).name.c_str());
  }
  if (!queue.left_lane) {
    failover_->leave_for_now(queue.peer, lane, queue.context, static_cast<std::uint32_t>(queue.sent->posted()));
  }
  queue.sent->start(*psn);
  queue.active = queue.qp_of(wanted);
  queue.packet_shift = packet_shift(lane_mtu(queue, wanted));
  queue.left_lane = false;
  queue.lane.store(wanted, std::memory_order_release);
  return true;
}

bool ContextSet::may_batch(const PeerQueue& queue, OperationKind kind, std::uint64_t bytes) const noexcept {
  const bool whole = bytes <= max_message_bytes_ && (bytes != 0 || kind == OperationKind::kSignal);
  return failover_ != nullptr && whole && queue.free_work >= entries_of(kind) && !queue.left_lane &&
         failover_->lane_for(queue.peer) == queue.lane.load(std::memory_order_relaxed);
}

void ContextSet::add_to_batch(Target target, PeerQueue& queue, Request& request) noexcept {
  if (batch_.queue() != &queue) {
    if (!batch_.is_empty()) post_batch();
    if (failures().has_failed()) return;
    batch_.set_queue(&queue);
    batch_target_ = target;
  }
  for (std::uint32_t entry = entries_of(request.work.kind); entry != 0; --entry) {
    fill_piece(queue, request, batch_.add());
    --queue.free_work;
  }
  if (batch_.end_operation()) post_batch();
}

void ContextSet::look_after_lanes() noexcept try {
  for (const UniqueCq& cq : further_cqs_) poll(cq.get());
  if (unread_ != nullptr) post_reads();
  if (!failover_->has_changes()) return;
  if (!batch_.is_empty()) post_batch();
  apply_lane_changes();
} catch (...) {  // the changes stay recorded
  VERBATIM_WARN("no memory to leave a lane of RMA at rank %u; it is tried again", own_rank());
}

void ContextSet::apply_lane_changes() {
  for (const Failover::Left& failed : failover_->take_lanes_to_leave()) {
    leave_lane(failed);
    if (failures().has_failed()) return;
  }
  for (PeerQueue& queue : queues_) {
    if (queue.held_first != nullptr) post_held(queue);
  }
}

void ContextSet::leave_lane(const Failover::Left& failed) {
  std::vector<PeerQueue*> busy;
  for (std::uint32_t context = 0; context < contexts_; ++context) {
    PeerQueue& queue = queues_[context * queues_per_context_ + failed.peer];
    if (queue.left_lane || queue.lane.load(std::memory_order_relaxed) != failed.lane) continue;
    if (queue.sent->size() == 0 && !queue.sent->ends_with_put()) {
      queue.left_lane = true;
    } else if (!queue.sent->all_flushed()) {
      return;
    } else {
      busy.push_back(&queue);
    }
  }
  if (!busy.empty() && !failed.psns) return;
  std::size_t again = 0;
  for (PeerQueue* const queue : busy) {
    again += leave_lane(*queue, queue->context < failed.psns->size() ? (*failed.psns)[queue->context] : wire::kNoPsn);
  }
  if (failures().has_failed() || (is_own(failed.peer) && flushes_under_way_[failed.lane] != 0)) return;
  failover_->left(failed.peer, failed.lane);
  VERBATIM_INFO("RMA from rank %u to %s has left lane %u; %zu operations are posted again", own_rank(),
                name_of_peer(failed.peer), failed.lane + 1, again);
}

// How many of the entries the peer has executed, up to the last signal; nullopt: not known.
std::optional<std::size_t> ContextSet::executed_entries(const SentWork& sent, std::uint32_t psn) {
  const std::uint64_t executed = sent.executed(psn);
  const bool is_plausible = psn != wire::kNoPsn && executed <= sent.posted();
  std::size_t number = 0;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    if (sent[i].kind != SentWork::Kind::kSignal) continue;
    if (!is_plausible) return std::nullopt;
    if (sent[i].end <= executed) number = i + 1;
  }
  return number;
}

// Returns how many requests are posted again.
std::size_t ContextSet::leave_lane(PeerQueue& queue, std::uint32_t psn) {
  SentWork& sent = *queue.sent;
  const std::optional<std::size_t> executed = executed_entries(sent, psn);
  if (!executed) {
    fail_unknown(queue);
    return 0;
  }
  std::vector<Request*> again;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const SentWork::Entry& entry = sent[i];
    Request& request = *entry.request;
    if (i < *executed && !reads(request.work.kind)) {
      if (entry.last) end_operation(request);
    } else if (again.empty() || again.back() != &request) {  // its first work request that is posted again
      request.posted = entry.start;
      request.work.signal_posted = false;
      again.push_back(&request);
    }
  }
  const std::size_t number = again.size();
  // Of a request that waits for room the first work requests may have been posted.
  if (number != 0 && again.back() == queue.held_first) again.pop_back();
  for (std::size_t i = again.size(); i > 0; --i) {
    again[i - 1]->next = queue.held_first;
    if (queue.held_first == nullptr) queue.held_last = again[i - 1];
    queue.held_first = again[i - 1];
  }
  queue.held_work += std::exchange(queue.free_work, 0) + static_cast<std::uint32_t>(sent.size());
  sent.start(0);  // find_lane begins anew
  queue.left_lane = true;
  return number;
}

}  // namespace verbatim::rma
