//: program verbatim_eplb_test link=eplb,gtest
//: test verbatim-eplb protocol=gtest

// The parts of verbatim-eplb that run without rank processes.
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memory/content.h"
#include "ranks/failure.h"
#include "ranks/statistics.h"
#include "verbatim-eplb/injection.h"
#include "verbatim-eplb/posting.h"
#include "verbatim-eplb/report.h"
#include "verbatim-eplb/rows.h"
#include "verbatim-eplb/stats.h"
#include "verbatim-eplb/watchdog.h"
#include "workload/content.h"

namespace verbatim::eplb {
namespace {

TEST(Percentile, AnyShare_IsOneOfTheValues) {
  EXPECT_EQ(0, ranks::percentile(std::vector<double>(), 0.5));
  EXPECT_EQ(7, ranks::percentile(std::vector<double>{7}, 0.99));
  EXPECT_EQ(2, ranks::percentile(std::vector<double>{3, 1, 2}, 0.5));
  EXPECT_EQ(3, ranks::percentile(std::vector<double>{3, 1, 2}, 1));
  EXPECT_EQ(1, ranks::percentile(std::vector<double>{3, 1, 2}, 0));
}

TEST(JainIndex, EqualShares_AreOneAndSingleShareIsOneOverN) {
  EXPECT_DOUBLE_EQ(1, jain({}));
  EXPECT_DOUBLE_EQ(1, jain({5, 5, 5}));
  EXPECT_DOUBLE_EQ(0.25, jain({8, 0, 0, 0}));
}

class PrintedTable : public testing::Test {
 protected:
  PrintedTable() { input_.workload = {2, 4, 4, {}}; }

  // The slowest checks of two ranks took 4 ms.
  std::string table(double moving_ms) const {
    Report report{.options = options_, .input = input_};
    report.by_rank.resize(2);
    report.by_rank[0].checking_ms = 3;
    report.by_rank[1].checking_ms = 4;
    report.by_rank[1].moving_ms = moving_ms;
    char text[8192] = {};
    std::FILE* const file = fmemopen(text, sizeof text, "w");
    print_table(file, report);
    std::fclose(file);
    return text;
  }

  Options options_;
  Input input_;
};

TEST_F(PrintedTable, EveryColumn_IsExplainedAboveTheTitles) {
  const std::string text = table(5);
  const std::size_t titles = text.find("#  layer  experts ");
  ASSERT_NE(std::string::npos, titles) << text;
  for (const char* column :
       {"experts", "bytes", "max per rank", "packs", "groups", "ops max", "time", "GB/s/rank", "#wrong"}) {
    EXPECT_LT(text.find(column), titles) << column;
  }
}

TEST_F(PrintedTable, ChecksThatTakeLongerThanMoving_AreNamed) {
  EXPECT_EQ(std::string::npos, table(5).find("# Checks "));
  EXPECT_NE(std::string::npos, table(1).find("# Checks              : 4.0 ms to fill and compare bytes")) << table(1);
}

std::string stats(std::uint64_t sent, std::uint64_t received) {
  return R"({"totals": {"send": {"connections": 2, "messages": 3, "bytes": )" + std::to_string(sent) +
         R"(}, "recv": {"connections": 1, "messages": 1, "bytes": )" + std::to_string(received) +
         R"(}}, "connections": [{"direction": "send", "peer": "host", "peer_process": "b", "messages": 1, "bytes": 30},
          {"direction": "send", "peer": "host", "peer_process": "a", "messages": 1, "bytes": 5},
          {"direction": "send", "peer": "host", "peer_process": "b", "messages": 1, "bytes": 10},
          {"direction": "recv", "peer": "host", "peer_process": "b", "messages": 1, "bytes": 7}]})";
}

TEST(PluginStatsCheck, TotalsAndBytesPerPeer_AreCompared) {
  EXPECT_EQ("equal", compare_stats(stats(45, 7), {0, 40, 5}, {7, 0, 0}));
  EXPECT_EQ("send: the plugin counted 45 bytes, the plan has 46", compare_stats(stats(45, 7), {41, 5}, {7}));
  EXPECT_EQ("send: by peer the plugin counted 5, 40 bytes, the plan has 15, 30",
            compare_stats(stats(45, 7), {30, 15}, {7}));
  EXPECT_EQ("recv: the plugin counted 7 bytes, the plan has 0", compare_stats(stats(45, 7), {40, 5}, {}));
  EXPECT_NE("equal", compare_stats("{", {}, {}));
  EXPECT_NE("equal", compare_stats("{}", {}, {}));
}

TEST(PluginStatsCheck, PutsByRank_AreCompared) {
  const std::string text = R"({"rma": [{"queues": [{"peer": 1, "completed": {"put_bytes": 30}},
      {"peer": 2, "completed": {"put_bytes": 5}}, {"peer": 1, "completed": {"put_bytes": 10}}]}]})";
  EXPECT_EQ("absent", compare_put_stats(std::nullopt, {}));
  EXPECT_EQ("equal", compare_put_stats(text, {0, 40, 5}));
  EXPECT_EQ("put: by rank the plugin counted 0, 40, 5 bytes, the plan has 0, 5, 40",
            compare_put_stats(text, {0, 5, 40}));
  EXPECT_NE("equal", compare_put_stats(text, {0, 40}));
  EXPECT_NE("equal", compare_put_stats("{}", {}));
}

// Records the text of a watchdog that fires; wait() blocks until then.
class Alarm {
 public:
  void fire(const std::string& text) {
    const std::lock_guard lock(mutex_);
    text_ = text;
    fired_.notify_one();
  }
  std::string wait() {
    std::unique_lock lock(mutex_);
    fired_.wait_for(lock, std::chrono::seconds(60), [this] { return !text_.empty(); });
    return text_;
  }
  bool has_not_fired() {
    const std::lock_guard lock(mutex_);
    return text_.empty();
  }

 private:
  std::mutex mutex_;
  std::condition_variable fired_;
  std::string text_;
};

TEST(Watchdog, NoProgress_ListsPendingOperations) {
  Alarm alarm;
  Watchdog watchdog(1, [&alarm](const std::string& text) { alarm.fire(text); });
  watchdog.begin("layer 3", 3, [](std::size_t i) { return "operation " + std::to_string(i); });
  watchdog.done(1);
  EXPECT_EQ("layer 3: no progress for 1 s, 2 of 3 operations pending:\n  operation 0\n  operation 2", alarm.wait());
}

TEST(Watchdog, NothingPending_DoesNotFire) {
  Alarm alarm;
  {
    Watchdog watchdog(1, [&alarm](const std::string& text) { alarm.fire(text); });
    watchdog.begin("layer 3", 1, [](std::size_t) { return "operation"; });
    watchdog.end();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  }
  EXPECT_TRUE(alarm.has_not_fired());
}

TEST(WeightRows, EveryRow_HasGuardsOnBothSides) {
  const auto memory = memory::make_host_memory();
  const ExpertLayout expert{{{"a", "fp8", 65}, {"b", "fp32", 4}, {"none", "fp8", 0}}};
  Rows rows(*memory, "weights", expert, 3);
  EXPECT_EQ(3U * 69, rows.piece().bytes - rows.guard_bytes());
  EXPECT_EQ(rows.piece().bytes, memory->allocated());
  rows.write_guards();
  const workload::Pattern content(1, 2);
  for (std::size_t t = 0; t < 3; ++t) {
    for (std::size_t row = 0; row < 3; ++row) {
      memory::fill(*memory, content, rows.at(t, row), expert.tensors[t].bytes);
    }
  }
  EXPECT_EQ(0U, rows.check_guards().bytes);
  for (std::size_t t = 0; t < 3; ++t) {
    for (std::size_t row = 0; row < 3; ++row) {
      EXPECT_EQ(0U, compare(*memory, rows.at(t, row), expert.tensors[t].bytes, content, "").bytes);
      for (std::byte* const guard : {rows.at(t, row) - 1, rows.at(t, row) + expert.tensors[t].bytes}) {
        *guard ^= std::byte{1};
        EXPECT_EQ(1U, rows.check_guards().bytes);
        *guard ^= std::byte{1};
      }
    }
  }
  rows.damage_guard(1, 2);
  EXPECT_EQ(1U, rows.check_guards().bytes);
  EXPECT_EQ(0U, rows.check_guards().first.find("weights, tensor b, guard after row 2, offset 0: "));
}

TEST(CompareBytes, WrongByteBeyondFirstBlock_IsNamed) {
  const auto memory = memory::make_host_memory();
  constexpr std::size_t kBytes = (std::size_t{2} << 20) + 7;
  std::byte* const data = memory->allocate(kBytes);
  const workload::Pattern content(3, 4);
  memory::fill(*memory, content, data, kBytes);
  EXPECT_EQ(0U, compare(*memory, data, kBytes, content, "buffer").bytes);
  data[kBytes - 1] ^= std::byte{1};
  data[(std::size_t{1} << 20) + 5] ^= std::byte{1};
  const Damage damage = compare(*memory, data, kBytes, content, "buffer");
  EXPECT_EQ(2U, damage.bytes);
  EXPECT_EQ(0U, damage.first.find("buffer, offset 1048581: ")) << damage.first;
  memory::poison(*memory, content, data, kBytes);
  EXPECT_EQ(kBytes, compare(*memory, data, kBytes, content, "buffer").bytes);
}

class CallPlan : public testing::Test {
 protected:
  CallPlan() {
    options_.ops_per_group = 0;
    input_.expert = {{{"a", "fp8", 3}, {"b", "fp8", 4}}};
    input_.workload = {2, 4, 4, {{0, {0, 1, 2, 3}, {2, 3, 0, 1}}}};
  }

  std::string calls(Mode mode) {
    options_.mode = mode;
    const Layer& layer = input_.workload.layers[0];
    const LayerPlan plan = plan_layer(input_.workload, layer, input_.expert, options_);
    const RankPlan rank_plan = plan_of_rank(input_.workload, layer, plan.transfers, 0);
    std::string text;
    for (const CallGroup& group : calls_of_rank(plan, rank_plan, input_.expert, mode)) {
      text += std::to_string(group.number) + ":";
      for (const Call& call : group.calls) {
        text += std::string(call.sends ? " s" : " r") + std::to_string(plan.transfers[call.transfer].expert) +
                (call.tensor == kAllTensors ? "" : "." + std::to_string(call.tensor));
      }
      text += "; ";
    }
    return text;
  }

  Options options_;
  Input input_;
};

TEST_F(CallPlan, WithoutLimit_SendsComeFirstInExpertOrder) {
  EXPECT_EQ("0: s0.0 s0.1 s1.0 s1.1 r2.0 r2.1 r3.0 r3.1; ", calls(Mode::kPerTensor));
  EXPECT_EQ("0: s0 s1 r2 r3; ", calls(Mode::kPacked));
  EXPECT_EQ("0: s0 s1 r2 r3; ", calls(Mode::kDirect));
}

TEST_F(CallPlan, OperationLimit_SplitsGroups) {
  options_.ops_per_group = 2;
  EXPECT_EQ("0: s0 s1; 1: r2 r3; ", calls(Mode::kPacked));
  options_.ops_per_group = 5;
  EXPECT_EQ("0: s0.0 s0.1 s1.0 s1.1; 1: r2.0 r2.1 r3.0 r3.1; ", calls(Mode::kPerTensor));
}

TEST_F(CallPlan, BatchedSchedule_HasOneDirectionPerGroup) {
  options_.peers = PeersAtATime::kOne;
  EXPECT_EQ("0: s0 s1; 1: r2 r3; ", calls(Mode::kPacked));
  EXPECT_EQ("0: s0 s1; 1: r2 r3; ", calls(Mode::kDirect));
  EXPECT_EQ("0: s0.0 s0.1 s1.0 s1.1; 1: r2.0 r2.1 r3.0 r3.1; ", calls(Mode::kPerTensor));
  options_.ops_per_group = 1;
  EXPECT_EQ("0: s0; 1: s1; 2: r2; 3: r3; ", calls(Mode::kPacked));
}

}  // namespace
}  // namespace verbatim::eplb
