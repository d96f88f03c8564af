// What a receiver does when a lane fails (failover.h): it counts the immediates that have arrived there, and if the
// lane has carried the CTS entries it writes all of them again, over another lane. Entries that the sender has already
// change nothing: they are the same.
#include <algorithm>

#include "net/transfer/lanes.h"
#include "net/transfer/recv_comm.h"

namespace verbatim {

void RecvComm::stop_lane(std::size_t lane) {
  for (const std::size_t qp : failover_->qps(lane)) queues_[qp].down = true;
}

bool RecvComm::lane_drained(std::size_t lane) const {
  return std::ranges::all_of(failover_->qps(lane),
                             [&](std::size_t qp) { return queues_[qp].flushed == queues_[qp].outstanding(); });
}

wire::LaneReport RecvComm::lane_report(std::size_t lane) const {
  wire::LaneReport report{.lane = static_cast<std::uint32_t>(lane), .members = next_member_};
  for (const std::size_t qp : failover_->qps(lane)) report.arrived[report.qps++] = queues_[qp].arrived();
  return report;
}

void RecvComm::recover_lane(std::size_t, const wire::LaneReport&) {
  if (!works(cts_queue_)) rewrite_ring();
}

void RecvComm::rewrite_ring() {
  use_cts_queue(fastest_qp(working_shares()));
  members_allowed_ = 0;
  cts_depth_ -= 1;  // until this WRITE completes
  ring_rewritten_ = true;
  ibv_sge segment = {reinterpret_cast<std::uint64_t>(control_.data()),
                     static_cast<std::uint32_t>(entry_bytes_ * wire::kRingEntries), cts_segment_.lkey};
  ibv_send_wr work{};
  work.wr_id = kRingWork | cts_queue_;
  work.sg_list = &segment;
  work.num_sge = 1;
  work.opcode = IBV_WR_RDMA_WRITE;
  work.send_flags = IBV_SEND_SIGNALED;
  work.wr.rdma.remote_addr = segment.addr + ring_offset_;
  work.wr.rdma.rkey = cts_work_.wr.rdma.rkey;
  ibv_send_wr* refused = nullptr;
  const int returned = ibv_post_send(cts_qp_, &work, &refused);
  if (returned != 0) fail_post("ibv_post_send", returned, cts_queue_);
}

// Read in this order: what is counted as posted when the arrivals equal it has all arrived. A CTS entry is counted
// before it is sent, so the sender cannot have sent anything else before it declared the lane down.
std::optional<std::uint32_t> RecvComm::all_arrived() const {
  const std::uint32_t members = next_member_;
  const std::uint64_t arrived = groups_arrived_;
  const std::uint64_t posted = groups_posted_;
  if (arrived != posted) return std::nullopt;
  return members;
}

}  // namespace verbatim
