// What a receiver does when a lane fails (failover.h): it reports what has arrived, and if the
// lane has carried the CTS entries it writes all of them again, over another lane. Entries that the sender has already
// change nothing: they are the same.
#include <algorithm>
#include <atomic>

#include "net/transfer/lanes.h"
#include "net/transfer/recv_comm.h"
#include "verbs/qp.h"

namespace verbatim {

void RecvComm::stop_lane(std::size_t lane) {
  for (const std::size_t qp : failover_->lane(lane).qps) queues_[qp].down = true;
}

bool RecvComm::lane_drained(std::size_t lane) const {
  const auto is_flushed = [&](std::size_t qp) { return queues_[qp].flushed == queues_[qp].outstanding(); };
  if (arrivals_ == nullptr) return std::ranges::all_of(failover_->lane(lane).qps, is_flushed);
  // Other lanes add to the arrival words too: those that work until the sender is fenced, those that it has declared
  // down until they are flushed here.
  if (!failover_->lane(lane).peer_fenced && !failure_state_.has(CommEvent::kPeerClosed)) return false;
  for (std::size_t qp = 0; qp < queues_.size(); ++qp) {
    if (queues_[qp].down && !is_flushed(qp)) return false;
  }
  return true;
}

wire::LaneReport RecvComm::lane_report(std::size_t lane) {
  if (replays_messages()) return message_report(lane);
  wire::LaneReport report{
      .lane = static_cast<std::uint32_t>(lane), .members = next_member_, .next_arrival = oldest_member_};
  for (const std::size_t qp : failover_->lane(lane).qps) report.arrived[report.qps++] = queues_[qp].arrived();
  return report;
}

// Which members have arrived. The parts of the other messages are counted anew: nothing adds to them any more. Not
// where the sender has not drained all lanes, because it has sent no message over this one.
wire::LaneReport RecvComm::message_report(std::size_t lane) {
  wire::LaneReport report{
      .lane = static_cast<std::uint32_t>(lane), .members = next_member_, .next_arrival = oldest_member_};
  report.qps = wire::kMaxInFlight / wire::kArrivedBits;
  const bool is_drained = arrivals_ == nullptr || failover_->notices.report(lane).all_drained != 0;
  for (std::uint32_t member = oldest_member_; member != next_member_;) {
    RecvRequest& request = requests_[wire::ring_index(member)];
    const std::uint32_t next = member + request.group_size;
    const bool arrived = !request.optional_completion && has_arrived(request);
    for (; arrived && member != next; ++member) {
      const std::uint32_t index = wire::ring_index(member);
      report.arrived[index / wire::kArrivedBits] |= 1U << index % wire::kArrivedBits;
    }
    // One QP delivers in order, also what has no completion signal.
    if (arrived && queues_.size() == 1) report.next_arrival = next;
    if (!has_arrived(request) && is_drained) {
      request.parts_seen = 0;
      if (arrivals_ != nullptr) {
        __atomic_store_n(&arrivals_[wire::ring_index(request.first_member)], std::uint64_t{0}, __ATOMIC_RELAXED);
      }
    }
    member = next;
  }
  return report;
}

void RecvComm::recover_lane(std::size_t, const std::optional<wire::LaneReport>& peer) {
  cts_arrived_ = cts_arrived_ || (peer && peer->members != 0);
  if (!works(cts_queue_) && failover_->working() != 0) rewrite_ring();
}

void RecvComm::adopt_lane(std::size_t lane) {
  for (const std::size_t qp : failover_->lane(lane).qps) {
    queues_[qp] = {endpoint_.qps()[qp].qp.get()};
    if (arrivals_ != nullptr) {
      post_fence_receive(qp);
    } else {
      post_receives(qp);
    }
  }
}

void RecvComm::use_lane(std::size_t lane) {
  if (failover_->lane_of(cts_queue_) == lane || !works(cts_queue_)) rewrite_ring();
}

// A port that cannot be flushed carries no data any more: all of its lanes are down. False: no other lane is left.
bool RecvComm::flush_failed(const ibv_wc& completion, std::size_t port, const FailedWork& work) noexcept {
  for (std::size_t qp = 0; qp < queues_.size(); ++qp) {
    if (endpoint_.qps()[qp].device != port) continue;
    if (!lane_failed(completion, qp, [&] { return work; })) return false;
  }
  flush_.leave_out(port, *endpoint_.ports()[port]->device);
  flush_.hold(completion.wr_id);
  failure_state_.set_flag(kLanes);  // until complete_held()
  return true;
}

// Returns what ibv_post_send returns.
int RecvComm::write_ring(std::size_t queue, std::uint64_t work_kind) const noexcept {
  const EndpointQp& end = endpoint_.qps()[queue];
  ibv_sge segment = {control_.address(), static_cast<std::uint32_t>(entry_bytes_ * wire::kRingEntries),
                     control_.lkey(end.device)};
  ibv_send_wr work{};
  work.wr_id = work_kind | queue;
  work.sg_list = &segment;
  work.num_sge = 1;
  work.opcode = IBV_WR_RDMA_WRITE;
  work.send_flags = IBV_SEND_SIGNALED;
  work.wr.rdma.remote_addr = segment.addr + ring_offset_;
  work.wr.rdma.rkey = endpoint_.remote().devices[end.remote_device].control_rkey;
  return post_send(end.qp.get(), work);
}

void RecvComm::rewrite_ring() {
  use_cts_queue(fastest_qp(working_shares()));
  members_allowed_ = 0;
  cts_depth_ -= 1;  // until this WRITE completes
  ring_rewritten_ = true;
  const int returned = write_ring(cts_queue_, kRingWork);
  if (returned != 0) fail_post("ibv_post_send", returned, cts_queue_);
}

// For an idle application. The data path may post an entry at the same time: it is visible with its last word, `ready`,
// or it is written again when the data path itself learns of the lane. One entry of each send queue is kept free for
// it.
bool RecvComm::rewrite_ring_without(LaneNotices::Lanes lanes) noexcept {
  const auto is_usable = [&](std::size_t qp) { return works(qp) && (lanes >> failover_->lane_of(qp) & 1) == 0; };
  if (is_usable(cts_queue_)) return true;
  for (std::size_t qp = 0; qp < endpoint_.qps().size(); ++qp) {
    if (is_usable(qp)) return write_ring(qp, kMonitorRingWork) == 0;
  }
  return false;
}

// Read in this order: what is counted as posted when the arrivals equal it has all arrived. A CTS entry is counted
// before it is sent, so the sender cannot have sent anything else before it declared the lane down.
std::optional<std::uint32_t> RecvComm::all_arrived() const {
  const std::uint32_t members = next_member_;
  const std::uint64_t arrived = groups_arrived_;
  std::atomic_thread_fence(std::memory_order_acquire);
  const std::uint64_t posted = groups_posted_;
  if (arrived != posted) return std::nullopt;
  return members;
}

}  // namespace verbatim
