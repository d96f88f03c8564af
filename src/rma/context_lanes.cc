// A set with several lanes: what is posted is remembered until it is acknowledged, and posted on the next lane when its
// lane has failed. A put may be executed twice: the same bytes, before anybody has been told of them. A signal must
// not: the PSN that the peer's QP expects says whether it was executed. Everything in front of the last executed signal
// was executed too, because the peer executes in order. Everything behind it is posted again, so that a signal and the
// puts in front of it use one lane.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "rma/context_posting.h"
#include "rma/failover.h"
#include "wire/rma.h"

namespace verbatim::rma {
namespace {

std::uint32_t packets_of(std::uint64_t bytes, ibv_mtu mtu) {
  const std::uint64_t packet_bytes = std::uint64_t{128} << mtu;
  return static_cast<std::uint32_t>(std::max<std::uint64_t>((bytes + packet_bytes - 1) / packet_bytes, 1));
}

}  // namespace

std::uint32_t ContextSet::rank_of(const PeerQueue& queue) const {
  return is_own(queue) ? own_rank() : path_of(queue).rank;
}

QpPath ContextSet::lane_path(const PeerQueue& queue, std::uint32_t lane) const {
  if (!is_own(queue)) return path_of(queue).lanes[lane].path;
  return {.mtu = lane_port(lane).active_mtu,
          .traffic_class = parts_.config.traffic_class.value_or(0),
          .service_level = parts_.config.service_level.value_or(0)};
}

void ContextSet::set_lane_keys(WorkRequest& work, const PeerQueue& queue, const Operation& operation,
                               bool signal) const {
  const std::uint32_t lane = queue.lane.load(std::memory_order_relaxed);
  const std::uint32_t rank = rank_of(queue);
  work.segment.lkey = signal || operation.local_memory == nullptr
                          ? parts_.scratch_lkeys[lane % parts_.scratch_lkeys.size()]
                          : operation.local_memory->lkey_of(lane);
  if (signal) {
    work.request.wr.atomic.rkey = operation.signal_memory->rkey_of(rank, lane);
  } else if (operation.remote_memory != nullptr) {
    work.request.wr.rdma.rkey = operation.remote_memory->rkey_of(rank, lane);
  }
}

void ContextSet::note_sent(PeerQueue& queue, SentWork::Entry entry, std::uint64_t bytes) noexcept {
  const std::uint32_t lane = queue.lane.load(std::memory_order_relaxed);
  queue.sent->add(entry, entry.signal ? 1 : packets_of(bytes, lane_path(queue, lane).mtu));
}

// Whether it is only the end of its lane.
bool ContextSet::is_end_of_lane(const ibv_wc& completion) noexcept {
  if (failover_ == nullptr || failures().has_failed()) return false;
  const bool path = completion.status == IBV_WC_RETRY_EXC_ERR || completion.status == IBV_WC_WR_FLUSH_ERR ||
                    completion.status == IBV_WC_RESP_TIMEOUT_ERR;
  PeerQueue& queue = *WorkId::request(completion.wr_id).queue;
  const std::uint32_t lane = queue.lane.load(std::memory_order_relaxed);
  try {
    if (!path ||
        !failover_->lane_failed(queue.peer, lane, lane_port(lane).device->verbs().wc_status_str(completion.status))) {
      return false;
    }
  } catch (...) {
    return false;
  }
  queue.sent->add_flushed();
  return true;
}

void ContextSet::look_after_lanes() noexcept {
  for (const UniqueCq& cq : further_cqs_) poll(cq.get());
  try {
    if (failover_->has_changes()) leave_failed_lanes();
  } catch (...) {
    fail_poll();
  }
}

void ContextSet::leave_failed_lanes() {
  const auto peers = static_cast<std::uint32_t>(queues_per_context_);
  for (std::uint32_t peer = 0; peer < peers && !failures().has_failed(); ++peer) {
    const std::uint32_t lane = queue_at(0, peer).lane.load(std::memory_order_relaxed);
    if (!failover_->has_failed(peer, lane)) continue;
    const std::optional<Failover::Psns> psns = failover_->fenced_by_both(peer, lane);
    if (!psns) continue;
    bool all_flushed = true;
    for (std::uint32_t context = 0; context < contexts_; ++context) {
      all_flushed = all_flushed && queue_at(context, peer).sent->all_flushed();
    }
    if (!all_flushed) continue;
    std::size_t again = 0;
    for (std::uint32_t context = 0; context < contexts_; ++context) {
      again += leave_lane(queues_[context * queues_per_context_ + peer],
                          context < psns->size() ? (*psns)[context] : wire::kNoPsn);
    }
    failover_->left_lane();
    if (failures().has_failed()) return;
    VERBATIM_INFO("RMA from rank %u to %s goes on over lane %u (%s); %zu operations are posted again", own_rank(),
                  name_of_peer(peer).c_str(), lane + 2, lane_port(lane + 1).name.c_str(), again);
    for (std::uint32_t context = 0; context < contexts_; ++context) {
      post_held(queues_[context * queues_per_context_ + peer]);
    }
    --peer;  // the next lane may have failed too
  }
}

// How many of the entries the peer has executed, up to the last signal; nullopt: not known.
std::optional<std::size_t> ContextSet::executed_entries(const SentWork& sent, std::uint32_t psn) {
  const std::uint64_t executed = sent.executed(psn);
  const bool is_plausible = psn != wire::kNoPsn && executed <= sent.posted();
  std::size_t number = 0;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    if (!sent[i].signal) continue;
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
      if (!entry.last) continue;
      request.work.state = Request::State::kDone;
      count_completed(request);
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
  sent.clear();
  queue.lane.store(queue.lane.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  return number;
}

}  // namespace verbatim::rma
