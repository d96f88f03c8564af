// verbatim-kv --compare, --isolation, --warmup and --idle: several runs and their comparison.
#include <algorithm>

#include "kv_run.h"

namespace verbatim::kv {
namespace {

std::vector<std::string> small_rounds(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"--requests", "24", "--tokens", "300", "--sigma", "0", "--scale", "40"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(CompareOption, TwoPlugins_PrintsMedians) {
  const KvRun run =
      run_kv(small_rounds({"--compare", setting("KV_PLUGIN") + "," + setting("SOCKET_PLUGIN"), "--rounds", "2"}));
  EXPECT_EQ(kOk, run.status) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("medians of 2 rounds, each without 8 warm-up requests")) << run.output;
  ASSERT_EQ(2U, run.report.size()) << run.output;
  for (std::size_t i = 0; i < 2; ++i) {
    const Json& entry = run.report[i];
    EXPECT_EQ(setting(i == 0 ? "KV_PLUGIN" : "SOCKET_PLUGIN"), entry["over"].get<std::string>());
    ASSERT_EQ(2U, entry["families"].size());
    for (const Json& family : entry["families"]) {
      EXPECT_EQ(2U, family["gb_s"].size());
      EXPECT_LT(0, family["gb_s"][1]) << "no time was measured";
      EXPECT_LT(0, family["ratio"]);
    }
    EXPECT_EQ(0, entry["last_run"]["wrong"]);
    EXPECT_EQ(8, entry["last_run"]["warmup"]);
  }
}

TEST(CompareOption, OverNccl_ComparesNetworks) {
  const KvRun run = run_kv(small_rounds({"--mode", "nccl", "--nccl", setting("HOST_NCCL"), "--cuda",
                                         setting("HOST_CUDA"), "--compare", "Verbatim,IB,Socket", "--rounds", "1"}));
  EXPECT_EQ(kOk, run.status) << run.output;
  ASSERT_EQ(3U, run.report.size()) << run.output;
  const char* const settings[] = {"NCCL_NET=Verbatim, NCCL_NET_PLUGIN=verbatim", "NCCL_NET=IB, NCCL_NET_PLUGIN=none",
                                  "NCCL_NET=Socket, NCCL_NET_PLUGIN=none"};
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string over = run.report[i]["last_run"]["over"];
    EXPECT_NE(std::string::npos, over.find(settings[i])) << over;
    EXPECT_LT(0, run.report[i]["families"][0]["gb_s"][0]);
  }
}

TEST(CompareOption, FailingPlugin_EndsWithItsStatus) {
  const KvRun missing = run_kv(small_rounds({"--compare", "/does/not/exist.so", "--rounds", "1"}));
  EXPECT_EQ(kFailed, missing.status) << missing.output;
  EXPECT_NE(std::string::npos, missing.output.find("/does/not/exist.so")) << missing.output;
  const KvRun corrupted = run_kv(small_rounds({"--compare", setting("MUTATE"), "--rounds", "1"}),
                                 {"MUTATE_PLUGIN=" + setting("KV_PLUGIN"), "MUTATE_MODE=flip-byte", "MUTATE_NTH=1"});
  EXPECT_EQ(kWrong, corrupted.status) << corrupted.output;
}

TEST(Warmup, WarmupRequests_AreServedAndNotTimed) {
  const KvRun run = run_kv(small_rounds({"--warmup", "20"}));
  EXPECT_EQ(kOk, run.status) << run.output;
  for (const char* const name : {"kv", "lf"}) {
    expect_plan(run, name);
    const Json& family = run.family(name);
    EXPECT_EQ(family["plan"]["messages"].get<int>() / 24 * 4, family["timed_messages"]);
    EXPECT_LT(family["timed_ns"], family["elapsed_ns"]);
  }
}

TEST(IdleFamily, Always_HasConnectionsAndNoRequests) {
  const KvRun run = run_kv(small_rounds({"--idle", "kv"}));
  EXPECT_EQ(kOk, run.status) << run.output;
  EXPECT_EQ(0, run.family("kv")["served"]);
  EXPECT_EQ(0, run.family("kv")["sent_messages"]);
  EXPECT_EQ(2, run.family("kv")["connections"]);
  EXPECT_EQ(24, run.family("lf")["served"]);
  expect_plan(run, "lf");
}

// The test machine may be busy, so the ratios of the rates are checked only roughly. The run itself fails when KV does
// not transfer the same data in all three cases.
TEST(Isolation, LfKilled_KvIsUnaffected) {
  const KvRun run = run_kv(small_rounds({"--isolation", "--rounds", "3"}));
  EXPECT_EQ(kOk, run.status) << run.output;
  ASSERT_EQ(3U, run.report["runs"].size()) << run.output;
  const Json& alone = run.report["runs"][0]["last_run"];
  EXPECT_EQ(0, alone["families"][0]["served"]);
  for (const std::size_t i : {1U, 2U}) EXPECT_EQ(24, run.report["runs"][i]["last_run"]["families"][0]["served"]);
  for (const Json& fresh : run.report["runs"][2]["lf_fresh_connections"]) EXPECT_LE(1, fresh);
  EXPECT_TRUE(run.report["errors"].empty()) << run.output;
  EXPECT_LT(0, run.report["lf_p99_ratio"]);
  EXPECT_GT(100, run.report["lf_p99_ratio"]) << run.output;
  EXPECT_LT(0.02, run.report["kv_rate_ratio"]) << run.output;
}

// The families do not wait for each other: a stalled family does not delay the last request of the other one.
TEST(Isolation, OneFamilyStalled_OtherFinishes) {
  constexpr int kDelayMs = 8000;
  for (const std::string stalled : {"kv", "lf"}) {
    const std::string other = stalled == "kv" ? "lf" : "kv";
    const std::string fault = "delay,delay-ms=" + std::to_string(kDelayMs) + ",request=0,family=" + stalled;
    const KvRun run = run_kv(small_rounds({"--inject", fault, "--request-timeout-ms", "60000"}));
    EXPECT_EQ(kOk, run.status) << run.output;
    expect_plan(run, stalled);
    expect_plan(run, other);
    EXPECT_LE(kDelayMs, run.family(stalled)["latency_p99_ms"]);
    EXPECT_GT(kDelayMs, run.family(other)["elapsed_ns"].get<double>() / 1e6) << run.output;
  }
}

TEST(ComparisonOptions, InvalidOptions_AreRejectedWithReason) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> invalid{
      {"--compare needs at least one name", {"--compare", ","}},
      {"cannot be used with --root", {"--compare", "a.so", "--root", "127.0.0.1:5", "--rank", "0", "--nranks", "2"}},
      {"needs two families", {"--isolation", "--lf", "none"}},
      {"sets --inject", {"--isolation", "--inject", "kill"}},
      {"needs --mode direct", {"--isolation", "--mode", "nccl"}},
      {"leaves no request of 24", {"--warmup", "24"}},
      {"no family lf", {"--idle", "lf", "--lf", "none"}},
      {"--tokens is not a number", {"--tokens", "nan"}},
      {"--api must be", {"--api", "3"}},
      {"--blocks", {"--blocks", "-1"}},
      {"/does/not/exist/report: cannot be written", {"--compare", "a.so", "--json", "/does/not/exist/report"}},
  };
  for (const auto& [text, more] : invalid) {
    std::vector<std::string> arguments{"--requests", "24"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const KvRun run = run_kv(arguments);
    EXPECT_EQ(kUsage, run.status) << run.output;
    EXPECT_NE(std::string::npos, run.output.find(text)) << text << " in: " << run.output;
    EXPECT_EQ(1, std::count(run.output.begin(), run.output.end(), '\n')) << run.output;
  }
}

}  // namespace
}  // namespace verbatim::kv
