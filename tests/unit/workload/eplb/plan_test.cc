// Transfer plans of verbatim-eplb: sources, rows, groups, self-check, generated workloads, planning time.
#include "workload/eplb/plan.h"

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "support/benchmark.h"
#include "workload/eplb/schedule.h"

namespace verbatim::eplb {
namespace {

using Triple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

Workload one_layer(std::size_t ranks, std::size_t experts, std::vector<int> before, std::vector<int> after) {
  Workload workload{ranks, experts, before.size(), {}};
  workload.layers.push_back({0, std::move(before), std::move(after)});
  return workload;
}

std::vector<Triple> triples_of(const Workload& workload) {
  std::vector<Triple> triples;
  for (const Transfer& transfer : plan_transfers(workload, workload.layers[0])) {
    triples.emplace_back(transfer.source, transfer.destination, transfer.expert);
  }
  return triples;
}

TEST(PlanTransfers, SamePlacement_IsEmpty) {
  EXPECT_TRUE(triples_of(one_layer(2, 4, {0, 1, 2, 3}, {0, 1, 2, 3})).empty());
  EXPECT_TRUE(triples_of(one_layer(2, 4, {0, 1, 2, 3}, {1, 0, 3, 2})).empty());
}

TEST(PlanTransfers, SeveralHolders_ShareReceiversEqually) {
  // Ranks 0 and 3 hold expert 0; ranks 1, 2, 4, 5 and 6 need it. Each holder sends to two of them, and rank 0 to the
  // fifth.
  const Workload workload = one_layer(7, 7, {0, 1, 2, 0, 4, 5, 6}, {0, 0, 0, 0, 0, 0, 0});
  EXPECT_EQ((std::vector<Triple>{{0, 1, 0}, {0, 2, 0}, {0, 6, 0}, {3, 4, 0}, {3, 5, 0}}), triples_of(workload));
}

TEST(PlanTransfers, FewerReceiversThanHolders_UseFirstHolders) {
  const Workload workload = one_layer(5, 3, {0, 0, 0, 1, 2}, {0, 0, 0, 0, 0});
  EXPECT_EQ((std::vector<Triple>{{0, 3, 0}, {1, 4, 0}}), triples_of(workload));
}

TEST(PlanTransfers, SeveralExperts_AreInExpertOrder) {
  const Workload workload = one_layer(2, 4, {3, 2, 1, 0}, {1, 0, 3, 2});
  EXPECT_EQ((std::vector<Triple>{{1, 0, 0}, {1, 0, 1}, {0, 1, 2}, {0, 1, 3}}), triples_of(workload));
}

TEST(PlanTransfers, DuplicateRows_FirstRowIsUsed) {
  const Workload workload = one_layer(2, 3, {0, 1, 1, 2, 2, 2}, {0, 2, 2, 2, 1, 1});
  const std::vector<Transfer> transfers = plan_transfers(workload, workload.layers[0]);
  ASSERT_EQ(2U, transfers.size());
  EXPECT_EQ(1U, transfers[0].source_row);
  EXPECT_EQ(1U, transfers[0].destination_row);
  EXPECT_EQ(0U, transfers[1].source_row);
  EXPECT_EQ(1U, transfers[1].destination_row);
}

TEST(RankPlan, EveryRow_HasItsFill) {
  const Workload workload = one_layer(2, 6, {0, 1, 2, 3, kEmptyRow, 4, 5, 4, 0, 1},  //
                                      {0, 2, 4, 4, kEmptyRow, kEmptyRow, 5, 5, 1, 2});
  const Layer& layer = workload.layers[0];
  const std::vector<Transfer> transfers = plan_transfers(workload, layer);
  const RankPlan first = plan_of_rank(workload, layer, transfers, 0);
  ASSERT_EQ(5U, first.rows.size());
  EXPECT_EQ(Fill::kKeep, first.rows[0].how);
  EXPECT_EQ(Fill::kCopy, first.rows[1].how);
  EXPECT_EQ(2U, first.rows[1].from);
  EXPECT_EQ(Fill::kReceive, first.rows[2].how);
  EXPECT_EQ(Fill::kDuplicate, first.rows[3].how);
  EXPECT_EQ(2U, first.rows[3].from);
  EXPECT_EQ(Fill::kKeep, first.rows[4].how);
  const RankPlan second = plan_of_rank(workload, layer, transfers, 1);
  EXPECT_EQ(Fill::kKeep, second.rows[0].how);
  EXPECT_EQ(Fill::kKeep, second.rows[1].how);
  EXPECT_EQ(Fill::kCopy, second.rows[2].how);
  EXPECT_EQ(1U, second.rows[2].from);
  EXPECT_EQ(Fill::kCopy, second.rows[3].how);
  EXPECT_EQ(4U, second.rows[3].from);
  EXPECT_EQ(Fill::kReceive, second.rows[4].how);
}

TEST(RankPlan, SeveralReceivers_ExpertIsPackedOnce) {
  const Workload workload = one_layer(4, 4, {0, 1, 2, 3}, {0, 0, 0, 0});
  const Layer& layer = workload.layers[0];
  const std::vector<Transfer> transfers = plan_transfers(workload, layer);
  const RankPlan plan = plan_of_rank(workload, layer, transfers, 0);
  EXPECT_EQ(3U, plan.sends.size());
  EXPECT_EQ(1U, plan.packs.size());
}

std::string error_text(const Workload& workload) {
  try {
    check(workload);
  } catch (const BadInput& bad) {
    return bad.what();
  }
  return "";
}

TEST(CheckWorkload, InvalidWorkload_IsRejectedWithLocation) {
  EXPECT_EQ("", error_text(one_layer(2, 2, {0, 1}, {1, 0})));
  EXPECT_EQ("5 rows are not divisible by 2 ranks", error_text(one_layer(2, 5, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4})));
  EXPECT_EQ("layer 0, new, row 1: expert 2 is not one of 0 to 1", error_text(one_layer(2, 2, {0, 1}, {0, 2})));
  EXPECT_EQ("layer 0, old, row 0: expert -2 is not one of 0 to 1", error_text(one_layer(2, 2, {-2, 1}, {0, 1})));
  EXPECT_EQ("layer 0, new, row 0: expert 1 is in no old row of any rank", error_text(one_layer(2, 2, {0, -1}, {1, 0})));
  EXPECT_EQ("layer 0, new: 3 rows instead of 2", error_text(one_layer(2, 2, {0, 1}, {1, 0, 0})));
}

class EveryPolicy : public testing::TestWithParam<std::pair<std::string, Policy>> {
 protected:
  static Workload workload(std::size_t ranks, std::uint64_t seed) {
    const std::size_t redundant = needed_redundant(GetParam().second, ranks, 40, 24);
    return make_workload({GetParam().second, ranks, 40, redundant, 3, seed});
  }
};
INSTANTIATE_TEST_SUITE_P(Eplb, EveryPolicy, testing::ValuesIn(policies()), [](const auto& tested) {
  std::string name = tested.param.first;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST_P(EveryPolicy, AnySeed_PlanPassesSelfCheck) {
  for (const std::size_t ranks : {1U, 2U, 4U, 8U, 16U, 32U}) {
    if (ranks == 1 && GetParam().first.starts_with("scale")) continue;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      const Workload tested = workload(ranks, seed);
      ASSERT_EQ("", error_text(tested));
      for (const Layer& layer : tested.layers) {
        const auto wrong = self_check(tested, layer, plan_transfers(tested, layer));
        EXPECT_FALSE(wrong.has_value()) << *wrong << " (" << ranks << " ranks, seed " << seed << ")";
      }
    }
  }
}

TEST_P(EveryPolicy, Seed_DeterminesWorkload) {
  EXPECT_EQ(workload(4, 7).layers[2].before, workload(4, 7).layers[2].before);
  EXPECT_NE(workload(4, 7).layers[2].before, workload(4, 8).layers[2].before);
  EXPECT_NE(workload(4, 7).layers[1].before, workload(4, 7).layers[2].before);
}

TEST(SelfCheck, WrongPlan_IsFound) {
  const Workload workload = one_layer(3, 3, {0, 1, 2}, {1, 2, 0});
  const Layer& layer = workload.layers[0];
  const std::vector<Transfer> correct = plan_transfers(workload, layer);
  ASSERT_FALSE(self_check(workload, layer, correct).has_value());
  std::vector<Transfer> missing(correct.begin() + 1, correct.end());
  EXPECT_TRUE(self_check(workload, layer, missing).has_value());
  std::vector<Transfer> twice = correct;
  twice.push_back(correct[0]);
  EXPECT_TRUE(self_check(workload, layer, twice).has_value());
  std::vector<Transfer> swapped = correct;
  std::swap(swapped[0].source, swapped[0].destination);
  EXPECT_TRUE(self_check(workload, layer, swapped).has_value());
}

class Schedules : public testing::TestWithParam<bool> {
 protected:
  static Schedule schedule(const std::vector<Transfer>& transfers, std::size_t ranks, std::size_t calls,
                           std::size_t limit) {
    return GetParam() ? schedule_batches(transfers, ranks, calls, limit)
                      : schedule_groups(transfers, ranks, calls, limit);
  }
};
INSTANTIATE_TEST_SUITE_P(Eplb, Schedules, testing::Bool(),
                         [](const auto& tested) { return tested.param ? "Batches" : "Groups"; });

TEST_P(Schedules, AnyLimit_KeepsLimitAndOrder) {
  for (const std::size_t ranks : {2U, 5U, 8U}) {
    for (const std::size_t limit : {0U, 3U, 4U, 10U}) {
      const Workload workload = make_workload({Policy::kShuffle, ranks, 60, 20, 1, 3});
      const std::vector<Transfer> transfers = plan_transfers(workload, workload.layers[0]);
      const std::size_t calls = 3;
      const Schedule result = schedule(transfers, ranks, calls, limit);
      ASSERT_EQ(transfers.size(), result.group_of.size());
      std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> operations;  // by group and rank
      std::map<std::pair<std::uint32_t, std::uint32_t>, std::set<std::uint32_t>> peers;
      std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> last;  // group by pair
      for (std::size_t i = 0; i < transfers.size(); ++i) {
        const Transfer& t = transfers[i];
        const std::uint32_t group = result.group_of[i];
        ASSERT_LT(group, result.groups);
        operations[{group, t.source}] += calls;
        operations[{group, t.destination}] += calls;
        peers[{group, t.source}].insert(t.destination);
        peers[{group, t.destination}].insert(t.source);
        const auto [before, first] = last.try_emplace({t.source, t.destination}, group);
        EXPECT_LE(before->second, group);
        before->second = group;
      }
      std::size_t largest = 0;
      for (const auto& [where, count] : operations) largest = std::max(largest, count);
      EXPECT_EQ(largest, result.largest_group);
      EXPECT_LE(largest, limit == 0 ? largest : limit);
      if (!GetParam()) continue;
      for (const auto& [where, others] : peers) EXPECT_EQ(1U, others.size());
    }
  }
}

// Pairs go into the first batch in which neither end has a peer, in the order of their first transfers. The two
// directions of a pair are two pairs, and later transfers of a pair stay in its batch.
TEST(BatchedSchedule, Pairs_GoIntoTheFirstFreeBatch) {
  const std::vector<Transfer> transfers{{0, 1, 0, 0, 0}, {1, 0, 1, 0, 0}, {2, 3, 2, 0, 0},
                                        {0, 2, 3, 0, 0}, {0, 1, 4, 0, 0}, {1, 3, 5, 0, 0}};
  const Schedule schedule = schedule_batches(transfers, 4, 1, 0);
  EXPECT_EQ((std::vector<std::uint32_t>{0, 1, 0, 2, 0, 2}), schedule.group_of);
  EXPECT_EQ(3U, schedule.groups);
  EXPECT_EQ(2U, schedule.largest_group);
}

TEST_P(Schedules, LimitBelowOneExpert_IsRejected) {
  const std::vector<Transfer> transfers{{0, 1, 0, 0, 0}};
  EXPECT_THROW(schedule(transfers, 2, 4, 3), BadInput);
}

// Processor time of this thread.
double plan_ms(const Workload& workload) {
  timespec begin{};
  timespec end{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
  std::size_t transfers = 0;
  for (const Layer& layer : workload.layers) {
    const std::vector<Transfer> plan = plan_transfers(workload, layer);
    const Schedule schedule = schedule_groups(plan, workload.ranks, 4, 128);
    const RankPlan own = plan_of_rank(workload, layer, plan, 0);
    transfers += schedule.group_of.size() + own.rows.size();
  }
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
  EXPECT_GT(transfers, 0U);
  return static_cast<double>(end.tv_sec - begin.tv_sec) * 1e3 + static_cast<double>(end.tv_nsec - begin.tv_nsec) / 1e6;
}

constexpr int kPlans = 21;

TEST(PlanningTimeBenchmark, DeepSeekV3) {
  for (const std::size_t ranks : {8U, 32U}) {
    const Workload workload = make_workload({Policy::kShuffle, ranks, 256, 32, 58, 1});
    test::run_benchmark("plan of 58 layers, " + std::to_string(ranks) + " ranks", "ms of processor time", kPlans,
                        [&] { return plan_ms(workload); });
  }
}

// Both sizes alternately, so that a machine that slows down affects both.
TEST(PlanningTimeBenchmark, TwiceTheRows) {
  const Workload small = make_workload({Policy::kShuffle, 8, 256, 32, 58, 1});
  const Workload large = make_workload({Policy::kShuffle, 8, 512, 64, 58, 1});
  test::run_benchmark("plan of twice the rows over plan", "times", kPlans, [&] {
    const double once = plan_ms(small);
    return plan_ms(large) / once;
  });
}

}  // namespace
}  // namespace verbatim::eplb
