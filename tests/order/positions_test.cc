// Every QP of every rank is at the position that the formula gives.
//: program order_positions sources=dump.cc link=qp_order,netapi,gtest
//: test order-positions-{} use=ranks
//:   v10 filter=*/v10_*-*/v10_32_*
//:   v10-32-ranks full filter=*/v10_32_*
//:   v11 full filter=*/v11_*
//:   v12 priority=5 filter=*/v12_*-*OtherWidths*/v12_32_*
//:   v12-32-ranks full filter=*OtherWidths*/v12_32_*

// The position of every QP by number: QP k of a rank to the peer with rotation r is at k * P + r. Tables v11 and v12
// announce peers and flows, for v10 VERBATIM_QP_POOL does.
#include <gtest/gtest.h>

#include <set>
#include <span>
#include <string>
#include <tuple>

#include "dump.h"

namespace verbatim::perf::qp_order {
namespace {

struct Width {
  int flows;
  int qps;
};
constexpr Width kTwoQps[] = {{2, 1}, {1, 2}};  // to each peer
constexpr Width kOtherWidths[] = {{1, 1}, {4, 1}, {2, 2}, {1, 4}};

class Positions : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int version() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }

  void set_pool(int peers, int qps_to_each) {
    if (version() < 11) {
      variables_.set("VERBATIM_QP_POOL", std::to_string(peers) + "x" + std::to_string(qps_to_each));
    }
  }

  // Connects all ranks. `announced`: peers in setNetAttr or VERBATIM_QP_POOL.
  void connect(const std::string& order, Width width, int announced) {
    variables_.set("VERBATIM_QP_ORDER", order);
    variables_.set("VERBATIM_QPS_PER_CONNECTION", std::to_string(width.qps));
    set_pool(announced, width.flows * width.qps);
    const Dump dump(variables_);
    Job job(plugin_path(), version(), {.ranks = ranks(), .flows = width.flows, .announced_peers = announced},
            dump.directory());
    job.connect();
    by_identity_ = ranks_of(job, ranks());
    dump_ = dump.read();
    job.close();
  }

  // Number of the senders' QPs that are not at their position.
  std::size_t misplaced(Width width, int peers) {
    std::size_t wrong = 0;
    std::size_t all = 0;
    for (const auto& [self, me] : by_identity_) {
      const std::vector<DumpedQp> qps = by_number(dump_, "send", self);
      std::set<std::pair<std::string, std::uint32_t>> seen;
      all += qps.size();
      for (std::size_t place = 0; place < qps.size(); ++place) {
        const DumpedQp& qp = qps[place];
        const auto rotation = static_cast<std::uint32_t>((by_identity_.at(qp.peer) - me - 1 + ranks()) % ranks());
        const std::uint32_t k = qp.connection * static_cast<std::uint32_t>(width.qps) + qp.index;
        seen.insert({qp.peer, k});
        const auto others = static_cast<std::uint32_t>(ranks() - 1);
        const bool right = place == k * others + rotation &&
                           qp.position == k * static_cast<std::uint32_t>(peers) + rotation &&
                           qp.peers == static_cast<std::uint32_t>(peers) && qp.block == 0;
        wrong += right ? 0 : 1;
      }
      EXPECT_EQ(seen.size(), qps.size()) << "two QPs of one connection have the same index";
    }
    const int wanted = ranks() * (ranks() - 1) * width.flows * width.qps;
    EXPECT_EQ(all, static_cast<std::size_t>(wanted));
    return wrong;
  }

  void expect_staggered(std::span<const Width> widths) {
    for (const Width width : widths) {
      SCOPED_TRACE(testing::Message() << width.flows << " connections of " << width.qps << " QPs");
      connect("staggered", width, ranks() - 1);
      EXPECT_EQ(misplaced(width, ranks() - 1), 0U);
      expect_receivers_in_order();
    }
  }

  // Receivers have no rotation to check: there the positions follow the arrival of the connect requests.
  void expect_receivers_in_order() {
    for (const auto& [self, me] : by_identity_) {
      const std::vector<DumpedQp> qps = by_number(dump_, "recv", self);
      for (std::size_t place = 1; place < qps.size(); ++place) {
        EXPECT_LT(qps[place - 1].position, qps[place].position) << "receivers of rank " << me;
      }
    }
  }

  Variables variables_;
  std::vector<DumpedQp> dump_;
  std::map<std::string, int> by_identity_;
};

INSTANTIATE_TEST_SUITE_P(Net, Positions,
                         testing::Combine(testing::Values(10, 11, 12), testing::Values(2, 4, 8, 16, 32)),
                         [](const auto& test) {
                           return "v" + std::to_string(std::get<0>(test.param)) + "_" +
                                  std::to_string(std::get<1>(test.param)) + "_ranks";
                         });

TEST_P(Positions, StaggeredOrder_EveryPositionIsExact) {
  expect_staggered(kTwoQps);
}

TEST_P(Positions, StaggeredOrderOfOtherWidths_EveryPositionIsExact) {
  expect_staggered(kOtherWidths);
}

TEST_P(Positions, CallerCountsItself_EveryPositionIsExact) {  // NCCL does
  connect("staggered", {2, 1}, ranks());
  EXPECT_EQ(misplaced({2, 1}, ranks()), 0U);
}

TEST_P(Positions, NativeOrder_PositionsDiffer) {
  if (ranks() < 4) GTEST_SKIP() << "with one peer all orders are the same";
  connect("native", {2, 1}, ranks() - 1);
  EXPECT_GT(misplaced({2, 1}, ranks() - 1), 0U);
}

}  // namespace
}  // namespace verbatim::perf::qp_order
