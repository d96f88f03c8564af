// How the contexts of a set fail: what is found out and logged. Nothing here runs while all is well.
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "net/diagnose/diagnosis.h"
#include "net/transfer/endpoint.h"
#include "rma/coll_comm.h"
#include "rma/context_posting.h"
#include "rma/work_id.h"
#include "verbs/device.h"
#include "verbs/errors.h"

namespace verbatim::rma {
namespace {

const char* name_of(OperationKind kind) {
  switch (kind) {
    case OperationKind::kPut:
      return "putting";
    case OperationKind::kPutSignal:
      return "putting, with a signal,";
    case OperationKind::kSignal:
      return "signalling";
    case OperationKind::kGet:
      return "getting";
    case OperationKind::kFlush:
      break;
  }
  return "flushing";
}

}  // namespace

PathFacts ContextSet::known_facts(const PeerQueue& queue, std::optional<std::uint32_t> of_lane) const {
  const std::uint32_t lane = of_lane ? *of_lane : queue.lane.load(std::memory_order_acquire);
  const Port& port = lane_port(lane);
  const Device& device = *port.device;
  const std::uint64_t completed = queue.counts.all_completed();
  PathFacts facts;
  facts.local = path_end(parts_.host_name, port, port.gid, queue.qp_of(lane)->qp_num);
  facts.roce = port.is_roce();
  facts.completed_counts = {completed, queue.counts.all_bytes(), completed != 0};
  facts.timeout = parts_.config.timeout;
  facts.retries = parts_.config.retry_count;
  if (is_own(queue.peer)) {
    facts.remote = facts.local;
    facts.mtu = port.active_mtu;
  } else {
    const LanePath& path = path_of(queue).lanes[lane];
    facts.remote = path.remote;
    facts.remote->qp = path.qps[queue.context].number;
    facts.mtu = path.connection.path.mtu;
    facts.traffic_class = path.connection.path.traffic_class;
    facts.service_level = path.connection.path.service_level;
    facts.peer_disconnected = parts_.ranks.at(path_of(queue).rank).channel->end() != PeerChannel::End::kOpen;
  }
  const std::uint64_t now = monotonic_ns();
  facts.age_ns = now - connected_ns_;
  facts.link = device.history().link_since(port.port_num, connected_ns_, now);
  return facts;
}

PathFacts ContextSet::facts(const PeerQueue& queue, std::optional<std::uint32_t> of_lane) const {
  const std::uint32_t lane = of_lane ? *of_lane : queue.lane.load(std::memory_order_relaxed);
  PathFacts facts = known_facts(queue, lane);
  const Port& port = lane_port(lane);
  add_port_facts(facts, port, port.gid, *counters_[lane % counters_.size()], connected_ns_);
  return facts;
}

std::string ContextSet::describe(const PeerQueue& queue) const {
  return "rank " + std::to_string(parts_.ranks.rank()) + " to " + name_of_peer(queue.peer) + ", RMA context " +
         std::to_string(queue.context);
}

const Request& ContextSet::request_of(std::uint64_t id) const {
  if (!WorkId::is_flush(id)) return WorkId::request(id);
  return queue_at(WorkId::context(id), static_cast<std::uint32_t>(paths_.size())).slots[WorkId::slot(id)];
}

Failure ContextSet::completion_failure(const ibv_wc& cause) const {
  const Request& request = request_of(cause.wr_id);
  const PeerQueue& queue = *request.queue;
  const PathFacts path = facts(queue, WorkId::lane_of_flush(cause.wr_id));
  FailedWork work;
  work.operation_text = name_of(request.work.kind);
  work.bytes = request.bytes;
  work.loopback = is_own(queue.peer);
  const char* const status = port().device->verbs().wc_status_str(cause.status);
  std::string text = describe(queue) + ": " + describe_completion(cause, status, work, 0);
  if (cause.status == IBV_WC_RETRY_EXC_ERR) text += owner().why_one_device();
  return {std::move(text), diagnose(cause.status, path), path};
}

// A flushed work request is the consequence of another one's failure, whose completion may come later.
void ContextSet::fail_completion(std::span<const ibv_wc> completions) noexcept {
  if (failures().has_failed() || is_end_of_lane(completions.front())) return;
  ibv_wc cause = completions.front();
  const auto examine = [&cause](const ibv_wc& completion) {
    if (WorkId::is_of_lanes(completion.wr_id)) return;
    if (cause.status == IBV_WC_WR_FLUSH_ERR && completion.status != IBV_WC_SUCCESS) cause = completion;
  };
  for (const ibv_wc& completion : completions) examine(completion);
  ibv_cq* const cq = request_of(cause.wr_id).queue->active->send_cq;
  ibv_wc later{};
  for (int left = cq->cqe; left > 0 && cause.status == IBV_WC_WR_FLUSH_ERR; --left) {
    if (ibv_poll_cq(cq, 1, &later) <= 0) break;
    if (later.status == IBV_WC_SUCCESS) complete(later.wr_id);
    examine(later);
  }
  parts_.failures.fail(error_kind_of(cause.status), Failures::Origin::kHere, [&] { return completion_failure(cause); });
}

// The peer may or may not have executed a signal: posted again it could count twice.
void ContextSet::fail_unknown(const PeerQueue& queue) noexcept {
  parts_.failures.fail(ErrorKind::kRemote, Failures::Origin::kHere, [&] {
    const PathFacts path = facts(queue);
    return Failure{describe(queue) +
                       ": the lane has failed, and the peer's device does not say which signals it has "
                       "executed (rq_psn of ibv_query_qp)",
                   {"the device or its driver reports no PSN that a QP expects, resets no QP in ERR, or was not asked",
                    "set VERBATIM_FAILOVER=0, and look at the link of " + path.local.device},
                   path};
  });
}

void ContextSet::fail_poll() noexcept {
  parts_.failures.fail(ErrorKind::kSystem, Failures::Origin::kHere, [&] {
    const PathFacts path = facts(queues_.front());
    return Failure{"rank " + std::to_string(parts_.ranks.rank()) + ", RMA: ibv_poll_cq failed",
                   diagnose(IBV_EVENT_CQ_ERR, path), path};
  });
}

void ContextSet::fail_post(const PeerQueue& queue, int returned) noexcept {
  parts_.failures.fail(ErrorKind::kSystem, Failures::Origin::kHere, [&] {
    const Status status = check_errno("ibv_post_send", returned);
    const PathFacts path = facts(queue);
    return Failure{describe(queue) + ": ibv_post_send failed with " + std::strerror(status.error().sys_errno),
                   diagnose(IBV_EVENT_QP_FATAL, path), path};
  });
}

}  // namespace verbatim::rma
