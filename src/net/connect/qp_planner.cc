#include "net/connect/qp_planner.h"

#include <algorithm>
#include <cstdio>
#include <tuple>

namespace verbatim {
namespace {

// QPs that all connections of one announcement should have together: more of them only crowd the NIC's cache.
constexpr std::size_t kTargetQps = 64;

std::vector<GatheredPlacement> order_by_columns(std::span<const PeerId> requests,
                                                const std::map<PeerId, std::uint32_t>& columns) {
  std::map<PeerId, std::uint32_t> rows;
  std::vector<GatheredPlacement> placements;
  for (std::size_t i = 0; i < requests.size(); ++i)
    placements.push_back({i, rows[requests[i]]++, columns.at(requests[i])});
  std::stable_sort(placements.begin(), placements.end(), [](const GatheredPlacement& a, const GatheredPlacement& b) {
    return std::tie(a.row, a.column) < std::tie(b.row, b.column);
  });
  return placements;
}

}  // namespace

PeerId peer_id(const wire::PeerIdentity& identity) {
  return {identity.host_id, identity.process_id, identity.device_guid, identity.context};
}

std::string to_string(const PeerId& peer) {
  char text[80];
  std::snprintf(text, sizeof text, "%llx-%llx-%llx-%x", static_cast<unsigned long long>(peer.host),
                static_cast<unsigned long long>(peer.process), static_cast<unsigned long long>(peer.device),
                peer.context);
  return text;
}

unsigned choose_qps(const QpRange& bounds, const Traffic& traffic) {
  if (!traffic.known()) return bounds.min;
  const std::size_t connections = std::size_t{traffic.peers} * traffic.flows;
  return static_cast<unsigned>(std::clamp<std::size_t>(kTargetQps / connections, bounds.min, bounds.max));
}

BlockShape choose_block_shape(const Traffic& traffic, std::size_t qps, std::size_t max_qps) {
  const std::size_t max = max_qps / std::max<std::size_t>(qps, 1);
  if (!traffic.known() || max == 0) return {};
  const std::size_t peers = std::min<std::size_t>(traffic.collective ? 1 : traffic.peers, max);
  const std::size_t connections = std::min<std::size_t>(traffic.flows, max / peers);
  return {static_cast<unsigned>(peers), static_cast<unsigned>(connections)};
}

QpPlacement QpPlanner::assign(const PeerId& id, const BlockShape& shape) {
  const auto [known, is_new] = peers_.try_emplace(id);
  Peer& peer = known->second;
  if (is_new) {
    if (blocks_.empty() || blocks_.back().seen == blocks_.back().peers) blocks_.push_back({.peers = shape.peers});
    peer.block = static_cast<std::uint32_t>(blocks_.size() - 1);
    peer.column = blocks_.back().seen++;
  }
  const std::uint32_t row = peer.connections++;
  if (row >= blocks_[peer.block].rows) grow(peer.block, shape.connections);
  const Block& block = blocks_[peer.block];
  // The last layer that begins at or before the row: mostly the last one.
  std::size_t layer = block.layers.size() - 1;
  while (block.first_rows[layer] > row) --layer;
  return {peer.block, block.layers[layer], row - block.first_rows[layer], row, peer.column};
}

void QpPlanner::grow(std::uint32_t index, unsigned rows) {
  Block& block = blocks_[index];
  block.layers.push_back(static_cast<std::uint32_t>(layers_.size()));
  block.first_rows.push_back(block.rows);
  block.rows += rows;
  layers_.push_back({index, block.peers, rows});
}

void QpPlanner::clear() {
  peers_.clear();
  blocks_.clear();
  layers_.clear();
}

std::vector<GatheredPlacement> order_gathered(std::span<const PeerId> requests) {
  std::map<PeerId, std::uint32_t> columns;
  for (const PeerId& peer : requests) columns.try_emplace(peer, static_cast<std::uint32_t>(columns.size()));
  return order_by_columns(requests, columns);
}

std::vector<GatheredPlacement> order_in_ring(std::span<const PeerId> requests, const PeerId& self) {
  std::vector<PeerId> ring(requests.begin(), requests.end());
  std::sort(ring.begin(), ring.end());
  ring.erase(std::unique(ring.begin(), ring.end()), ring.end());
  std::rotate(ring.begin(), std::upper_bound(ring.begin(), ring.end(), self), ring.end());
  std::map<PeerId, std::uint32_t> columns;
  for (const PeerId& peer : ring) columns.emplace(peer, static_cast<std::uint32_t>(columns.size()));
  return order_by_columns(requests, columns);
}

}  // namespace verbatim
