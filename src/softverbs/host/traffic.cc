#include "softverbs/host/traffic.h"

#include <algorithm>

namespace verbatim::softverbs {

void add_traffic(HostTraffic& sum, const SharedQp& qp) {
  const std::uint32_t peer_port = qp.peer_port.load(std::memory_order_relaxed);
  if (peer_port == 0 || peer_port > kMaxDevices || qp.device >= kMaxDevices) return;
  const SendCounters& posted = qp.counters.sends;
  const auto of = [&](ibv_wr_opcode opcode) { return posted.requests[opcode].get(); };
  const std::uint64_t reads = of(IBV_WR_RDMA_READ);
  const std::uint64_t writes = of(IBV_WR_RDMA_WRITE) + of(IBV_WR_RDMA_WRITE_WITH_IMM);
  const std::uint64_t sends = of(IBV_WR_SEND) + of(IBV_WR_SEND_WITH_IMM);
  const std::uint64_t atomics = of(IBV_WR_ATOMIC_CMP_AND_SWP) + of(IBV_WR_ATOMIC_FETCH_AND_ADD);
  const std::uint64_t messages = reads + writes + sends + atomics;
  if (messages == 0) return;
  const std::uint64_t bytes = posted.bytes.get();
  const std::uint64_t bytes_read =
      std::min(bytes, static_cast<std::uint64_t>(static_cast<double>(bytes) * static_cast<double>(reads) /
                                                 static_cast<double>(messages)));
  TrafficCounters& own = sum[qp.device];
  TrafficCounters& peer = sum[peer_port - 1];
  // A response carries the data of a READ or the value of an atomic.
  own.xmit_bytes.add_shared(bytes - bytes_read);
  own.xmit_messages.add_shared(messages);
  own.rcv_bytes.add_shared(bytes_read);
  own.rcv_messages.add_shared(reads + atomics);
  peer.rcv_bytes.add_shared(bytes - bytes_read);
  peer.rcv_messages.add_shared(messages);
  peer.xmit_bytes.add_shared(bytes_read);
  peer.xmit_messages.add_shared(reads + atomics);
  peer.rcv_sends.add_shared(sends);
  peer.rcv_writes.add_shared(writes);
  peer.rcv_reads.add_shared(reads);
  peer.rcv_atomics.add_shared(atomics);
}

void add_traffic(HostTraffic& sum, const Segment& segment) {
  add_shared(sum, segment.destroyed_traffic);
  const ObjectCounters& qps = segment.counters.objects[static_cast<std::size_t>(ObjectKind::kQp)];
  const std::uint32_t end = std::min(qps.table_end.load(std::memory_order_acquire), kMaxQps);
  for (std::uint32_t index = 0; index < end; ++index) {
    if (segment.qps[index].qpn.load(std::memory_order_acquire) != 0) add_traffic(sum, segment.qps[index]);
  }
}

}  // namespace verbatim::softverbs
