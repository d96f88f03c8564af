#include "net/connect/qp_planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace verbatim {
namespace {

wire::PeerIdentity peer(std::uint64_t process) {
  return {1, process, 0xa, 0};
}

// Positions of the connections of rank `me` of `n`, by peer and connection. The peers come in NCCL's rotated order,
// each with its `q` connections in a row.
std::map<std::pair<unsigned, unsigned>, unsigned> positions(unsigned n, unsigned q, unsigned me,
                                                            const BlockShape& shape) {
  QpPlanner planner;
  std::map<std::pair<unsigned, unsigned>, unsigned> found;
  for (unsigned i = 1; i < n; ++i) {
    const unsigned to = (me + i) % n;
    for (unsigned k = 0; k < q; ++k) {
      const QpSlot slot = planner.assign(peer(to), shape, 0);
      EXPECT_EQ(slot.block.number, 0U);
      EXPECT_EQ(slot.index(), slot.first_position(1));
      found[{to, k}] = slot.index();
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

TEST(QpPlanner, SeveralQpsPerConnection_PositionsAreQpByQp) {
  QpPlanner planner;
  planner.assign(peer(0), {3, 2}, 0);
  planner.assign(peer(0), {3, 2}, 0);
  planner.assign(peer(1), {3, 2}, 0);
  EXPECT_EQ(planner.assign(peer(1), {3, 2}, 0).first_position(4), 1U * 4 * 3 + 1) << "after four QPs of three peers";
}

TEST(QpPlanner, UnusedPeerOfBlock_KeepsOrder) {
  // NCCL counts the caller itself among the peers.
  const auto exact = positions(8, 4, 3, {7, 4});
  const auto wide = positions(8, 4, 3, {8, 4});
  std::vector<std::pair<unsigned, std::pair<unsigned, unsigned>>> by_exact;
  std::vector<std::pair<unsigned, std::pair<unsigned, unsigned>>> by_wide;
  for (const auto& [connection, position] : exact) by_exact.emplace_back(position, connection);
  for (const auto& [connection, position] : wide) by_wide.emplace_back(position, connection);
  std::sort(by_exact.begin(), by_exact.end());
  std::sort(by_wide.begin(), by_wide.end());
  for (std::size_t i = 0; i < by_exact.size(); ++i) EXPECT_EQ(by_exact[i].second, by_wide[i].second);
}

TEST(QpPlanner, PeersBeyondBlock_StartNextBlock) {
  QpPlanner planner;
  constexpr unsigned kPeers = 128;  // NCCL connects in rounds of 128 peers
  std::set<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> assigned;
  std::uint32_t blocks = 0;
  for (unsigned i = 0; i < 300; ++i) {
    for (unsigned k = 0; k < 2; ++k) {
      const QpSlot slot = planner.assign(peer(i), {kPeers, 2}, blocks);
      blocks = std::max(blocks, slot.block.number + 1);
      EXPECT_EQ(slot.block.number, i / kPeers);
      EXPECT_EQ(slot.peer, i % kPeers);
      EXPECT_EQ(slot.flow, k);
      EXPECT_TRUE(assigned.insert({slot.block.number, slot.flow, slot.peer}).second);
    }
  }
  EXPECT_EQ(blocks, 3U);
}

TEST(QpPlanner, FlowsBeyondBlock_StartNextBlockWithSamePeers) {
  QpPlanner planner;
  std::uint32_t blocks = 0;
  for (unsigned i = 0; i < 3; ++i) {
    for (unsigned k = 0; k < 5; ++k) {
      const QpSlot slot = planner.assign(peer(i), {3, 2}, blocks);
      blocks = std::max(blocks, slot.block.number + 1);
      EXPECT_EQ(slot.block.number, k / 2);
      EXPECT_EQ(slot.peer, i);
      EXPECT_EQ(slot.flow, k % 2);
      EXPECT_EQ(slot.block.first_flow, k / 2 * 2);
    }
  }
  EXPECT_EQ(blocks, 3U);
}

TEST(QpPlanner, NewShape_AppliesToLaterBlocks) {
  QpPlanner planner;
  planner.assign(peer(0), {2, 1}, 0);
  EXPECT_EQ(planner.assign(peer(1), {4, 3}, 1).block.number, 0U);
  const QpSlot further = planner.assign(peer(0), {4, 3}, 1);
  EXPECT_EQ(further.block.number, 1U);
  EXPECT_EQ(further.block.shape, (BlockShape{2, 3})) << "a further flow keeps the peers of the block before";
  EXPECT_EQ(further.peer, 0U);
  const QpSlot next = planner.assign(peer(2), {4, 3}, 2);
  EXPECT_EQ(next.block.number, 2U);
  EXPECT_EQ(next.block.shape, (BlockShape{4, 3}));
  EXPECT_EQ(next.peer, 0U);
}

TEST(QpPlanner, PeerIdentity_IsWrittenWithoutListen) {
  EXPECT_EQ(to_string(wire::PeerIdentity{.host_id = 1, .process_id = 2, .device_guid = 3, .context = 4, .listen = 5}),
            "1-2-3-4");
}

TEST(ChooseBlockShape, AnyTraffic_StaysWithinLimit) {
  EXPECT_EQ(choose_block_shape({.peers = 7, .flows = 4}, 1, 1024), (BlockShape{7, 4}));
  EXPECT_EQ(choose_block_shape({.peers = 7, .flows = 4}, 2, 40), (BlockShape{7, 2})) << "fewer flows";
  EXPECT_EQ(choose_block_shape({.peers = 4000, .flows = 4}, 1, 1024), (BlockShape{1024, 1})) << "fewer peers";
  EXPECT_EQ(choose_block_shape({.peers = 7, .flows = 4}, 8, 7), BlockShape{}) << "not even one connection";
  EXPECT_EQ(choose_block_shape({}, 1, 1024), BlockShape{}) << "nothing announced";
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
  EXPECT_EQ(choose_qps({4, 4}, {.peers = 1000, .flows = 4}), 4U) << "a fixed number is not changed";
}

TEST(PrecedesInRing, EveryRank_StartsAfterItself) {
  constexpr unsigned kPeers = 8;
  for (unsigned me = 0; me < kPeers; ++me) {
    std::vector<wire::PeerIdentity> ring;
    for (unsigned to = 0; to < kPeers; ++to) {
      if (to != me) ring.insert(ring.end(), 2, peer(to * 11 % kPeers));  // an order that is not the ring's
    }
    const wire::PeerIdentity self = peer(me * 11 % kPeers);
    std::stable_sort(ring.begin(), ring.end(), [&](const wire::PeerIdentity& a, const wire::PeerIdentity& b) {
      return precedes_in_ring(self, a, b);
    });
    for (std::size_t i = 0; i < ring.size(); ++i) EXPECT_EQ(ring[i].process_id, (self.process_id + 1 + i / 2) % kPeers);
  }
}

}  // namespace
}  // namespace verbatim
