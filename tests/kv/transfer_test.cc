// Transfers of caches from prefill to decode ranks, for all presets and shapes: every byte is correct, the messages
// match the plan, and the families share no connection.
#include <algorithm>
#include <fstream>
#include <numeric>

#include "../support/benchmark.h"
#include "../support/scratch_directory.h"
#include "kv_run.h"

namespace verbatim::kv {
namespace {

using Arguments = std::vector<std::string>;

Arguments small(Arguments more) {
  Arguments arguments{"--requests", "12", "--tokens", "300", "--scale", "40"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

struct Shape {
  const char* name;
  Arguments arguments;
};

class EveryShape : public testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(
    Kv, EveryShape,
    testing::Values(Shape{"Llama1", {"--preset", "llama-70b-tp1"}},
                    Shape{"Llama2Ratio4", {"--preset", "llama-70b-tp2", "--tp-ratio", "4", "--decode", "4"}},
                    Shape{"Llama4Ratio2",
                          {"--preset", "llama-70b-tp4", "--tp-ratio", "2", "--decode", "2", "--lf", "indexer"}},
                    Shape{"Llama8", {"--preset", "llama-70b-tp8", "--fragmentation", "1"}},
                    Shape{"DeepSeek", {"--preset", "deepseek-mla-bf16", "--fragmentation", "0"}},
                    Shape{"DeepSeekFp8Ratio2", {"--preset", "deepseek-mla-fp8", "--tp-ratio", "2", "--decode", "2"}},
                    Shape{"TwoByTwo", {"--prefill", "2", "--decode", "2", "--allocations", "family"}},
                    Shape{"AllocationPerLayer", {"--allocations", "layer"}},
                    Shape{"OneAtATime", {"--concurrency", "1", "--depth", "1", "--group", "1"}}),
    [](const auto& tested) { return tested.param.name; });

TEST_P(EveryShape, AnyShape_IsServedAsPlanned) {
  const KvRun run = run_kv(small(GetParam().arguments), {"VERBATIM_TOKEN="});  // on one host none is needed
  EXPECT_EQ(kOk, run.status) << run.output;
  for (const Json& family : run.report["families"]) expect_plan(run, family["name"]);
  for (const Json& rank : run.report["ranks"]) EXPECT_EQ(rank["allocations"], rank["registrations"]);
}

class EveryTable : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Kv, EveryTable, testing::Values("6", "8", "10", "11"),
                         [](const auto& tested) { return std::string("v") + tested.param; });

TEST_P(EveryTable, AnyTableVersion_Serves) {
  const KvRun run = run_kv(small({"--api", GetParam()}));
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_plan(run, "kv");
  expect_plan(run, "lf");
}

TEST(Transfer, PluginWithoutGlobalRegistration_Serves) {
  const KvRun run = run_kv(small({"--plugin", setting("SOCKET_PLUGIN")}));
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_plan(run, "kv");
  expect_plan(run, "lf");
}

KvRun thousands_of_small_requests() {
  const KvRun run = run_kv({"--preset", "llama-70b-tp8", "--lf", "indexer", "--scale", "80", "--requests", "5500",
                            "--tokens", "16", "--sigma", "0", "--concurrency", "32"});
  EXPECT_EQ(kOk, run.status) << run.output;
  return run;
}

TEST(Transfer, ThousandsOfSmallRequests_AreServed) {
  const KvRun run = thousands_of_small_requests();
  expect_plan(run, "kv");
  expect_plan(run, "lf");
  EXPECT_LE(10'000, run.family("kv")["served"].get<int>() + run.family("lf")["served"].get<int>());
}

TEST(TransferBenchmark, ThousandsOfSmallRequests) {
  test::run_benchmark("validation of small requests, larger of both families", "% of the time of the transfers", 5, [] {
    const KvRun run = thousands_of_small_requests();
    return std::max(run.family("kv")["validation_percent"].get<double>(),
                    run.family("lf")["validation_percent"].get<double>());
  });
}

TEST(Transfer, PagesAreNamed) {
  const KvRun run = run_kv(small({"--pages", "small"}));
  EXPECT_EQ(kOk, run.status) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("# memory of rank 0: host memory, small pages, ")) << run.output;
  EXPECT_EQ("small", run.report["pages"]);
  EXPECT_EQ("huge", run_kv(small({})).report["pages"]);
}

TEST(Transfer, PluginCounters_AreEqual) {
  const KvRun run = run_kv(small({"--prefill", "2", "--decode", "2"}));
  EXPECT_EQ(kOk, run.status) << run.output;
  for (const Json& rank : run.report["ranks"]) {
    if (rank["plugin_counters"] == "absent") GTEST_SKIP() << "this plugin keeps no counters";
    EXPECT_EQ("equal", rank["plugin_counters"]);
  }
}

TEST(Transfer, PrefixHits_AreNotSent) {
  const ScratchDirectory scratch;
  const std::string list = scratch.path() / "requests";
  std::ofstream(list) << "640\n640 0.5\n640 1\n64 1\n";
  const KvRun run = run_kv({"--request-file", list, "--scale", "61"});
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_plan(run, "kv");
  expect_plan(run, "lf");
  EXPECT_EQ(10 + 5 + 1 + 1, run.family("kv")["sent_messages"]);
  EXPECT_EQ(17 * 73'728, run.family("kv")["sent_bytes"]);
  EXPECT_EQ(17 * 8'448, run.family("lf")["sent_bytes"]);
}

TEST(Transfer, GroupLimit_DeterminesGroupedReceives) {
  const ScratchDirectory scratch;
  const std::string list = scratch.path() / "requests";
  std::ofstream(list) << "1280\n";  // 20 blocks
  const KvRun eight = run_kv({"--request-file", list, "--scale", "61"});
  EXPECT_EQ((Json{{"8", 2}, {"4", 1}}), eight.family("kv")["groups"]) << eight.output;
  const KvRun three = run_kv({"--request-file", list, "--scale", "61", "--group", "3"});
  EXPECT_EQ((Json{{"3", 6}, {"2", 1}}), three.family("kv")["groups"]) << three.output;
}

// Two runs delivered the same data when the sums of the CRCs of all requests are equal.
TEST(TwoFamilies, EitherOrder_GivesSameResults) {
  const KvRun alone = run_kv(small({"--lf", "none"}));
  const KvRun after = run_kv(small({}));
  const KvRun before = run_kv(small({"--lf-first"}));
  for (const KvRun* const run : {&alone, &after, &before}) {
    EXPECT_EQ(kOk, run->status) << run->output;
    expect_plan(*run, "kv");
    EXPECT_NE(0, run->family("kv")["crc_sum"]);
    for (const char* const what : {"crc_sum", "sent_bytes", "sent_messages"}) {
      EXPECT_EQ(alone.family("kv")[what], run->family("kv")[what]);
    }
  }
  EXPECT_EQ(after.family("lf")["crc_sum"], before.family("lf")["crc_sum"]);
}

// The bytes of each queue pair that carried data are exactly the bytes of one family.
TEST(TwoFamilies, EachFamily_HasItsOwnQueuePairs) {
  const KvRun run = run_kv(small({}));
  EXPECT_EQ(kOk, run.status) << run.output;
  ASSERT_EQ(2U, run.devices.size()) << run.output;
  const std::vector<std::uint64_t> expected{run.family("lf")["plan"]["bytes"], run.family("kv")["plan"]["bytes"]};
  EXPECT_EQ(expected, run.bytes_of_queue_pairs());
}

// The registrations of the caches in the device depend only on the number of allocations: 61 layers of two families
// need no more than one layer.
TEST(TwoFamilies, EachAllocation_IsRegisteredOnce) {
  const auto registered = [](const Arguments& more) {
    Arguments arguments{"--requests", "1", "--tokens", "64", "--sigma", "0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const KvRun run = run_kv(arguments);
    EXPECT_EQ(kOk, run.status) << run.output;
    std::uint64_t calls = 0;
    for (const Json& device : run.devices) {
      const Json& mr = device["objects"]["mr"];
      EXPECT_EQ(0, mr["alive"]) << "a region was not deregistered";
      calls += mr["created"].get<std::uint64_t>();
    }
    std::uint64_t cache_registrations = 0;
    for (const Json& rank : run.report["ranks"]) {
      EXPECT_EQ(rank["allocations"], rank["reg_mr_calls"]);
      cache_registrations += rank["reg_mr_calls"].get<std::uint64_t>();
    }
    return calls -
           cache_registrations;  // registrations of the connections: equal for runs with the same number of families
  };
  const std::uint64_t others = registered({"--scale", "61", "--allocations", "slab"});
  EXPECT_EQ(others, registered({"--scale", "1", "--allocations", "slab"}));
  EXPECT_EQ(others, registered({"--scale", "1", "--allocations", "layer"}));
  EXPECT_EQ(others, registered({"--scale", "1", "--allocations", "family"}));
}

}  // namespace
}  // namespace verbatim::kv
