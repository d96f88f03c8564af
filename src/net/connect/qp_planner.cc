#include "net/connect/qp_planner.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

namespace verbatim {
namespace {

// QPs of all announced connections together: a NIC caches the state of a limited number of QPs.
constexpr std::size_t kTargetQps = 64;

}  // namespace

std::string to_string(const wire::PeerIdentity& peer) {
  char text[80];
  std::snprintf(text, sizeof text, "%" PRIx64 "-%" PRIx64 "-%" PRIx64 "-%" PRIx32, peer.host_id, peer.process_id,
                peer.device_guid, peer.context);
  return text;
}

bool precedes_in_ring(const wire::PeerIdentity& self, const wire::PeerIdentity& a, const wire::PeerIdentity& b) {
  return std::pair(a < self, a) < std::pair(b < self, b);
}

unsigned choose_qps(const QpRange& bounds, const AnnouncedFlows& announced) {
  if (!announced.known()) return bounds.min;
  const std::size_t connections = std::size_t{announced.peers} * announced.flows;
  return static_cast<unsigned>(std::clamp<std::size_t>(kTargetQps / connections, bounds.min, bounds.max));
}

BlockShape choose_block_shape(const AnnouncedFlows& announced, std::size_t qps, std::size_t max_qps) {
  const std::size_t max = max_qps / std::max<std::size_t>(qps, 1);
  if (!announced.known() || max == 0) return {};
  const std::size_t peers = std::min<std::size_t>(announced.collective ? 1 : announced.peers, max);
  const std::size_t flows = std::min<std::size_t>(announced.flows, max / peers);
  return {static_cast<unsigned>(peers), static_cast<unsigned>(flows)};
}

const QpBlock* QpPlanner::find(std::uint32_t peer, std::uint32_t flow) const {
  const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(), [&](const QpBlock& block) {
    return peer - block.first_peer < block.shape.peers && flow - block.first_flow < block.shape.flows;
  });
  return found != blocks_.rend() ? &*found : nullptr;
}

QpSlot QpPlanner::assign(const wire::PeerIdentity& id, const BlockShape& shape, std::uint32_t next_number) {
  Peer& peer = peers_.try_emplace(id, Peer{.index = static_cast<std::uint32_t>(peers_.size())}).first->second;
  const std::uint32_t flow = peer.flows++;
  const QpBlock* block = find(peer.index, flow);
  if (block == nullptr) {
    QpBlock next{.number = next_number, .first_peer = peer.index, .first_flow = flow, .shape = shape};
    if (flow != 0) {
      const QpBlock& previous = *find(peer.index, flow - 1);
      next.first_peer = previous.first_peer;
      next.shape.peers = previous.shape.peers;
    }
    block = &blocks_.emplace_back(next);
  }
  return {.block = *block, .peer = peer.index - block->first_peer, .flow = flow - block->first_flow};
}

}  // namespace verbatim
