// Runs every operation of verbatim-perf over the plugin that PERF_PLUGIN names, with every table version that it
// exports.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "netapi/plugin.h"
#include "perf_run.h"

namespace verbatim::perf {
namespace {

using Arguments = std::vector<std::string>;

std::string plugin() {
  return setting("PERF_PLUGIN");
}

bool exports(int version) {
  return netapi::open_plugin(plugin(), version).plugin != nullptr;
}

void expect_correct(Arguments arguments) {
  arguments.insert(arguments.end(), {"--plugin", plugin(), "--timeout", "60"});
  const Outcome outcome = run(arguments);
  EXPECT_EQ(0, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("# Wrong elements    : 0 OK")) << outcome.output;
}

const char* const kOperations[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
                                   "alltoall",   "alltoallv",  "gather",         "scatter",   "hypercube",
                                   "sendrecv",   "stream",     "pingpong",       "grouped"};

class EveryOperation : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Perf, EveryOperation, testing::ValuesIn(kOperations),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(EveryOperation, ZeroToSeveralChunks_IsCorrect) {
  expect_correct(
      {GetParam(), "-b", "0", "-e", "200K", "-f", "40", "-n", "2", "-w", "1", "--chunk", "24K", "--channels", "2"});
}

TEST_P(EveryOperation, OneByteElements_AreCorrect) {
  expect_correct({GetParam(), "-b", "1", "-e", "9999", "-f", "9999", "-n", "3", "-w", "0", "-d", "uint8"});
}

class EveryTable : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Perf, EveryTable, testing::Range(netapi::kOldestVersion, netapi::kNewestVersion + 1),
                         [](const auto& tested) { return "v" + std::to_string(tested.param); });

TEST_P(EveryTable, CollectivesAndGroups_AreCorrect) {
  if (!exports(GetParam())) GTEST_SKIP() << "not exported";
  const std::string version = std::to_string(GetParam());
  expect_correct({"all_reduce", "--api", version, "-b", "20000", "-e", "20000", "-n", "2", "-w", "0"});
  expect_correct({"grouped", "--api", version, "-b", "20000", "-e", "20000", "-n", "2", "-w", "0"});
}

TEST(RankCount, OneOrMany_IsCorrect) {
  for (const char* ranks : {"1", "3", "4"}) {
    expect_correct({"all_reduce", "--procs", ranks, "-b", "1000", "-e", "50000", "-f", "50", "-n", "2", "-w", "1"});
    expect_correct({"sendrecv", "--procs", ranks, "-b", "1000", "-e", "50000", "-f", "50", "-n", "2", "-w", "1"});
  }
}

TEST(Timeout, None_RunsToTheEnd) {
  const Outcome outcome = run({"sendrecv", "--plugin", plugin(), "-T", "0", "-b", "8", "-e", "8", "-n", "1"});
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
}

TEST(JsonReport, OneRun_HasRowsOfTheTable) {
  const std::string path = testing::TempDir() + "perf_" + std::to_string(getpid()) + ".json";
  expect_correct({"all_gather", "-b", "1K", "-e", "4K", "-f", "2", "-n", "3", "-w", "0", "--json", path});
  const auto json = nlohmann::json::parse(std::ifstream(path));
  std::remove(path.c_str());
  EXPECT_EQ("all_gather", json["operation"]);
  EXPECT_EQ(plugin(), json["plugin"]["path"].get<std::string>());
  EXPECT_EQ(netapi::open_plugin(plugin()).plugin->api_version(), json["plugin"]["api_version"].get<int>());
  EXPECT_EQ(netapi::open_plugin(plugin()).plugin->name(), json["plugin"]["name"].get<std::string>());
  EXPECT_EQ(2U, json["ranks"].size());
  EXPECT_GE(json["devices"].size(), 1U);
  EXPECT_EQ(0, json["wrong"]);
  ASSERT_EQ(3U, json["rows"].size());
  EXPECT_FALSE(json.contains("type"));
  EXPECT_EQ("float", json["rows"][0]["type"]);
  EXPECT_EQ(1024, json["rows"][0]["bytes"]);
  EXPECT_EQ(128, json["rows"][0]["count"]);  // of floats for each of two ranks
  EXPECT_GT(json["rows"][2]["busbw_gb_s"], 0);
  EXPECT_EQ(0, json["rows"][2]["wrong"]);
}

// Runs verbatim-perf with --json and returns the file's content.
nlohmann::json run_for_json(Arguments arguments) {
  const std::string path = testing::TempDir() + "perf_" + std::to_string(getpid()) + ".json";
  arguments.insert(arguments.end(), {"--json", path});
  const Outcome outcome = run(arguments);
  EXPECT_EQ(0, outcome.status) << outcome.output;
  const auto json = nlohmann::json::parse(std::ifstream(path), nullptr, false);
  std::remove(path.c_str());
  return json;
}

void expect_ascending(const nlohmann::json& min, const nlohmann::json& p50, const nlohmann::json& p99,
                      const nlohmann::json& p99_9) {
  EXPECT_GT(min, 0);
  EXPECT_LE(min, p50);
  EXPECT_LE(p50, p99);
  EXPECT_LE(p99, p99_9);
}

TEST(Merge, Devices_AreUsedTogether) {
  const auto opened = netapi::open_plugin(plugin());
  ASSERT_NE(nullptr, opened.plugin);
  setenv("SOFTVERBS_DEVICES", "3", 1);
  const Arguments sizes{"-b", "1", "-e", "2M", "-f", "64", "-n", "3", "-w", "1"};
  const auto with = [&](Arguments arguments) {
    arguments.insert(arguments.end(), sizes.begin(), sizes.end());
    return arguments;
  };
  if (opened.plugin->has_make_vdevice()) {
    for (const char* operation : {"all_reduce", "alltoall", "grouped"}) {
      const auto json = run_for_json(with({operation, "--plugin", plugin(), "--merge", "2", "--channels", "2"}));
      EXPECT_EQ(2, json["merge"]);
      EXPECT_EQ(0, json["wrong"]);
      ASSERT_EQ(1U, json["devices"].size());
      EXPECT_EQ((std::vector<int>{0, 1}), json["devices"][0]["members"].get<std::vector<int>>());
    }
    const Outcome many = run(with({"stream", "--plugin", plugin(), "--merge", "4"}));
    EXPECT_EQ(kFailed, many.status);
    EXPECT_NE(std::string::npos, many.output.find("--merge 4: the plugin has only 3 devices. Next: ")) << many.output;
  }
  const auto one = run_for_json(with({"stream", "--plugin", plugin(), "--merge", "1"}));
  EXPECT_EQ(1, one["merge"]);
  EXPECT_EQ(1U, one["devices"].size());
  unsetenv("SOFTVERBS_DEVICES");
}

TEST(Merge, NoTableForIt_IsReported) {
  if (!exports(8)) GTEST_SKIP() << "no table before v9";
  setenv("SOFTVERBS_DEVICES", "2", 1);
  const Outcome outcome = run({"stream", "--plugin", plugin(), "--api", "8", "--merge", "2", "-b", "8", "-e", "8"});
  unsetenv("SOFTVERBS_DEVICES");
  EXPECT_EQ(kFailed, outcome.status);
  EXPECT_NE(std::string::npos, outcome.output.find("--merge 2: ")) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("Next: ")) << outcome.output;
  EXPECT_EQ(kUsage, run({"stream", "--plugin", plugin(), "--merge", "9"}).status);
  EXPECT_EQ(kUsage, run({"stream", "--plugin", plugin(), "--merge", "0"}).status);
}

TEST(Latency, PingPong_HasPercentiles) {
  const auto json =
      run_for_json({"pingpong", "--plugin", plugin(), "-b", "8", "-e", "8K", "-f", "1024", "-n", "200", "-w", "5"});
  ASSERT_EQ(2U, json["rows"].size());
  for (const auto& row : json["rows"]) {
    const auto& latency = row["latency_us"];
    expect_ascending(latency["min"], latency["p50"], latency["p99"], latency["p99_9"]);
    EXPECT_LE(latency["min"], row["time_us"]);
  }
}

TEST(Compare, TwoPlugins_RunInTurn) {
  const auto lines = run_for_json({"pingpong", "--compare", plugin() + "," + plugin(), "--rounds", "3", "-b", "8", "-e",
                                   "8", "-n", "20", "-w", "1"});
  ASSERT_EQ(2U, lines.size());
  EXPECT_DOUBLE_EQ(1, lines[0]["ratio"]);
  EXPECT_GT(lines[1]["ratio"], 0);
  for (const auto& line : lines) {
    EXPECT_EQ(plugin(), line["plugin"]);
    EXPECT_EQ(8, line["bytes"]);
    for (std::size_t round = 0; round < 3; ++round) {
      const auto& latency = line["latency_us"];
      expect_ascending(latency["min"][round], latency["p50"][round], latency["p99"][round], latency["p99_9"][round]);
    }
  }
}

TEST(Compare, RequiredBandwidth_IsNotJudged) {
  const Outcome outcome = run({"sendrecv", "--compare", plugin() + "," + plugin(), "--rounds", "1", "-b", "8", "-e",
                               "8", "-n", "1", "--format", "nccl-tests"},
                              {"NCCL_TESTS_MIN_BW=1e6"});
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
}

TEST(Compare, ContradictingOptions_AreRejected) {
  EXPECT_EQ(kUsage, run({"pingpong"}).status);
  EXPECT_EQ(kUsage, run({"pingpong", "--plugin", plugin(), "--compare", plugin()}).status);
  EXPECT_EQ(kUsage,
            run({"pingpong", "--compare", plugin(), "--root", "127.0.0.1:1", "--rank", "0", "--nranks", "2"}).status);
}

}  // namespace
}  // namespace verbatim::perf
