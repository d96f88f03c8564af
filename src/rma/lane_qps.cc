#include "rma/lane_qps.h"

#include <cstring>

#include "net/transfer/endpoint.h"
#include "verbs/qp.h"

namespace verbatim::rma {

std::vector<LaneQp> lane_qps(const ContextSet& set, std::uint32_t peer, std::uint32_t lane) {
  std::vector<LaneQp> qps;
  for (std::uint32_t context = 0; context < set.contexts(); ++context) {
    qps.push_back({set.queue_at(context, peer).qp_of(lane), peer, lane, context});
  }
  ibv_qp* const flush = set.is_own(peer) ? set.flush_qp(lane) : nullptr;
  if (flush != nullptr) qps.push_back({flush, peer, lane, 0, true});
  return qps;
}

Status connect_lane_qp(const ContextSet& set, const Config& config, const LaneQp& own, const Port& port,
                       const wire::RmaLane* offer, QpPsns psns) {
  QpConnection connection = to_oneself(port, own.qp, psns.first, config);
  if (!set.is_own(own.peer)) {
    const LanePath& path = set.path_of(set.queue_at(own.context, own.peer)).lanes[own.lane];
    connection = path.connection;
    connection.psns = psns;
    connection.remote.qp_num = path.qps[own.context].number;
    if (offer != nullptr) {
      connection.remote.lid = offer->lid;
      std::memcpy(connection.remote.gid.raw, offer->gid.data(), sizeof connection.remote.gid.raw);
    }
    if (config.ece) connection.ece = ece_of(path.qps[own.context]);
    // The same at both ends.
    const ibv_qp* const first = set.queue_at(0, own.peer).qp_of(own.lane);
    const std::uint64_t number = mix_bits(std::uint64_t{first->qp_num} + path.qps.front().number);
    if (port.is_roce()) connection.path.flow_label = flow_label(number, own.context, set.contexts());
    connection.lag_index = lag_index(*port.device, number, own.context, set.contexts());
  }
  if (connection.peer_reads == 0) {
    return Error{ErrorKind::kUsage, 0, "READs and atomics, which the peer's device does not execute,"};
  }
  const Result<ConnectedQp> connected = connect_qp(own.qp, port, connection, config);
  return connected ? Status() : Status(connected.error());
}

}  // namespace verbatim::rma
