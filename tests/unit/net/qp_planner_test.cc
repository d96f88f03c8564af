#include "net/connect/qp_planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

namespace verbatim {
namespace {

PeerId peer(std::uint64_t process) {
  return {1, process, 0xa, 0};
}

// Positions of the connections of one sender in a job, by peer and connection: peers in NCCL's rotated order, each with
// all of its connections.
std::map<std::pair<unsigned, unsigned>, unsigned> positions(unsigned n, unsigned q, unsigned me,
                                                            const BlockShape& shape) {
  QpPlanner planner;
  std::map<std::pair<unsigned, unsigned>, unsigned> found;
  for (unsigned i = 1; i < n; ++i) {
    const unsigned to = (me + i) % n;
    for (unsigned k = 0; k < q; ++k) {
      const QpPlacement assign = planner.assign(peer(to), shape);
      found[{to, k}] = assign.row * planner.layer(assign.layer).peers + assign.column;
    }
  }
  return found;
}

TEST(QpPlanner, RotatedPeers_PositionsAreRoundByRound) {
  for (const unsigned n : {2U, 4U, 8U, 16U, 32U}) {
    for (const unsigned q : {1U, 2U, 4U}) {
      for (unsigned me = 0; me < n; ++me) {
        const auto found = positions(n, q, me, {n - 1, q});
        for (unsigned to = 0; to < n; ++to) {
          if (to == me) continue;
          const unsigned rotation = (to + n - me - 1) % n;
          for (unsigned k = 0; k < q; ++k) EXPECT_EQ(found.at({to, k}), k * (n - 1) + rotation);
        }
      }
    }
  }
}

TEST(QpPlanner, UnusedColumn_KeepsOrder) {
  // NCCL counts the caller itself among the peers.
  const auto exact = positions(8, 4, 3, {7, 4});
  const auto wide = positions(8, 4, 3, {8, 4});
  std::vector<std::pair<unsigned, std::pair<unsigned, unsigned>>> by_exact;
  std::vector<std::pair<unsigned, std::pair<unsigned, unsigned>>> by_wide;
  for (const auto& [who, position] : exact) by_exact.emplace_back(position, who);
  for (const auto& [who, position] : wide) by_wide.emplace_back(position, who);
  std::sort(by_exact.begin(), by_exact.end());
  std::sort(by_wide.begin(), by_wide.end());
  for (std::size_t i = 0; i < by_exact.size(); ++i) EXPECT_EQ(by_exact[i].second, by_wide[i].second);
}

TEST(QpPlanner, PeersBeyondBlock_StartNextBlock) {
  QpPlanner planner;
  constexpr unsigned kColumns = 128;  // NCCL connects in rounds of so many
  std::set<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> taken;
  for (unsigned i = 0; i < 300; ++i) {
    for (unsigned k = 0; k < 2; ++k) {
      const QpPlacement assign = planner.assign(peer(i), {kColumns, 2});
      EXPECT_EQ(assign.block, i / kColumns);
      EXPECT_EQ(assign.column, i % kColumns);
      EXPECT_EQ(assign.row, k);
      EXPECT_TRUE(taken.insert({assign.block, assign.row, assign.column}).second);
    }
  }
  EXPECT_EQ(planner.layers(), 3U);
}

TEST(QpPlanner, ConnectionsBeyondRows_StartNextLayer) {
  QpPlanner planner;
  for (unsigned i = 0; i < 3; ++i) {
    for (unsigned k = 0; k < 5; ++k) {
      const QpPlacement assign = planner.assign(peer(i), {3, 2});
      EXPECT_EQ(assign.block, 0U);
      EXPECT_EQ(assign.column, i);
      EXPECT_EQ(assign.row, k);
      EXPECT_EQ(assign.layer, k / 2);
      EXPECT_EQ(assign.layer_row, k % 2);
    }
  }
  EXPECT_EQ(planner.layers(), 3U);
}

TEST(QpPlanner, NewShape_AppliesToLaterBlocks) {
  QpPlanner planner;
  planner.assign(peer(0), {2, 1});
  EXPECT_EQ(planner.assign(peer(1), {4, 3}).block, 0U);
  EXPECT_EQ(planner.assign(peer(0), {4, 3}).layer, 1U);
  EXPECT_EQ(planner.layer(1).peers, 2U) << "a block keeps its columns";
  EXPECT_EQ(planner.layer(1).rows, 3U);
  const QpPlacement next = planner.assign(peer(2), {4, 3});
  EXPECT_EQ(next.block, 1U);
  EXPECT_EQ(planner.layer(next.layer).peers, 4U);
}

TEST(QpPlanner, ListensOfOnePeer_HaveOnePeerId) {
  wire::PeerIdentity identity{.host_id = 1, .process_id = 2, .device_guid = 3, .context = 4, .listen = 5};
  const PeerId first = peer_id(identity);
  identity.listen = 6;
  EXPECT_EQ(peer_id(identity), first);
  identity.context = 7;
  EXPECT_NE(peer_id(identity), first);
  EXPECT_EQ(to_string(first), "1-2-3-4");
}

TEST(QpPlanner, Clear_StartsFirstBlock) {
  QpPlanner planner;
  planner.assign(peer(5), {1, 1});
  planner.clear();
  const QpPlacement assign = planner.assign(peer(6), {2, 2});
  EXPECT_EQ(assign.block, 0U);
  EXPECT_EQ(assign.column, 0U);
  EXPECT_EQ(planner.layers(), 1U);
}

TEST(ShapeBlock, AnyTraffic_StaysWithinLimit) {
  EXPECT_EQ(choose_block_shape({.peers = 7, .flows = 4}, 1, 1024), (BlockShape{7, 4}));
  EXPECT_EQ(choose_block_shape({.peers = 7, .flows = 4}, 2, 40), (BlockShape{7, 2})) << "fewer rows";
  EXPECT_EQ(choose_block_shape({.peers = 4000, .flows = 4}, 1, 1024), (BlockShape{1024, 1})) << "fewer columns";
  EXPECT_EQ(choose_block_shape({.peers = 7, .flows = 4}, 8, 7), BlockShape{}) << "not even one connection";
  EXPECT_EQ(choose_block_shape({}, 1, 1024), BlockShape{}) << "nothing known";
  EXPECT_EQ(choose_block_shape({.peers = 4, .flows = 16, .collective = true}, 1, 1024), (BlockShape{1, 16}));
}

TEST(ChooseQps, AnyTraffic_StaysWithinRange) {
  const QpRange bounds{1, 8};
  EXPECT_EQ(choose_qps(bounds, {.peers = 1, .flows = 1}), 8U);
  EXPECT_EQ(choose_qps(bounds, {.peers = 7, .flows = 2}), 4U);
  EXPECT_EQ(choose_qps(bounds, {.peers = 63, .flows = 1}), 1U);
  EXPECT_EQ(choose_qps(bounds, {.peers = 1000, .flows = 4}), 1U);
  EXPECT_EQ(choose_qps({2, 8}, {.peers = 1000, .flows = 4}), 2U);
  EXPECT_EQ(choose_qps(bounds, {}), 1U) << "nothing announced";
  EXPECT_EQ(choose_qps({4, 4}, {.peers = 1000, .flows = 4}), 4U) << "a fixed number stays";
}

TEST(OrderGathered, SeveralPeers_GiveRowsInRequestOrder) {
  const PeerId a = peer(9);
  const PeerId b = peer(3);
  const std::vector<PeerId> requests{a, a, b, b, b};
  const std::vector<GatheredPlacement> places = order_gathered(requests);
  std::vector<std::size_t> order;
  for (const GatheredPlacement& assign : places) order.push_back(assign.request_index);
  EXPECT_EQ(order, (std::vector<std::size_t>{0, 2, 1, 3, 4}));
  EXPECT_EQ(places[3].row, 1U);
  EXPECT_EQ(places[3].column, 1U);
}

TEST(OrderInRing, EveryRank_StartsAfterItself) {
  constexpr unsigned kPeers = 8;
  for (unsigned me = 0; me < kPeers; ++me) {
    std::vector<PeerId> requests;
    for (unsigned to = 0; to < kPeers; ++to) {
      if (to != me) requests.insert(requests.end(), 2, peer(to * 11 % kPeers));  // in nobody's order
    }
    for (const GatheredPlacement& assign : order_in_ring(requests, peer(me * 11 % kPeers))) {
      const auto to = static_cast<unsigned>(requests[assign.request_index].process);
      EXPECT_EQ(assign.column, (to + kPeers - me * 11 % kPeers - 1) % kPeers);
    }
  }
}

}  // namespace
}  // namespace verbatim
