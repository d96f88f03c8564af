#include "rma/lane_qps.h"

#include <cstring>

#include "verbs/qp.h"

namespace verbatim::rma {

std::vector<LaneQp> lane_qps(const ContextSet& set, std::uint32_t peer, std::uint32_t lane) {
  std::vector<LaneQp> qps;
  for (std::uint32_t context = 0; context < set.contexts(); ++context) {
    qps.push_back({.qp = set.queue_at(context, peer).qp_of(lane), .context = context});
    if (set.is_own(peer))
      qps.push_back({.qp = set.flush_qp(context, lane), .context = context, .is_for_flushes = true});
  }
  return qps;
}

Status connect_qp(const ContextSet& set, const Config& config, const LaneQp& own, const Port& port, LaneOf lane,
                  const wire::RmaLane* offer, QpPsns psns) {
  const PeerQueue& queue = set.queue_at(own.context, lane.peer);
  QpAddress remote = qp_address(port, own.qp);
  std::uint8_t reads = responder_reads(*port.device);
  if (!set.is_own(lane.peer)) {
    const LanePath& path = set.path_of(queue).lanes[lane.lane];
    const wire::HelloQp& theirs = path.qps[own.context];
    remote = path.address;
    remote.qp_num = theirs.number;
    reads = path.reads;
    if (offer != nullptr) {
      remote.lid = offer->lid;
      std::memcpy(remote.gid.raw, offer->gid.data(), sizeof remote.gid.raw);
    }
    if (config.ece && theirs.has_ece) {
      const Result<bool> set_options = set_ece(own.qp, *port.device, {theirs.ece[0], theirs.ece[1], theirs.ece[2]});
      if (!set_options) return set_options.error();
    }
  }
  if (reads == 0) return Error{ErrorKind::kUsage, 0, "READs and atomics, which the peer's device does not execute,"};
  if (const Status moved = to_rtr(own.qp, port, remote, set.lane_path(queue, lane.lane), psns.expected); !moved) {
    return moved.error();
  }
  return to_rts(own.qp, port, config.timeout, config.retry_count, reads, psns.first);
}

}  // namespace verbatim::rma
