// verbatim-eplb --mode put: over the RMA table of the plugin that EPLB_PLUGIN names, and over NCCL's host calls, with
// libraries for host memory in place of NCCL and CUDA.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "eplb_run.h"

namespace verbatim::eplb {
namespace {

using Arguments = std::vector<std::string>;

Outcome run_put(Arguments more, const perf::PerfProcess::Environment& environment = {}) {
  Arguments arguments{"--timeout", "60"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const auto has = [&](const char* option) {
    return std::find(arguments.begin(), arguments.end(), option) != arguments.end();
  };
  if (!has("--plugin")) arguments.insert(arguments.end(), {"--plugin", setting("EPLB_PLUGIN")});
  if (!has("--compare")) arguments.insert(arguments.end(), {"--mode", "put"});
  return perf::PerfProcess(arguments, environment, "EPLB_TOOL").finish();
}

Outcome run_put_over_nccl(Arguments more, const perf::PerfProcess::Environment& environment = {}) {
  more.insert(more.end(), {"--over", "nccl", "--nccl", setting("HOST_NCCL"), "--cuda", setting("HOST_CUDA")});
  return run_put(more, environment);
}

void expect_correct_puts(const Outcome& outcome) {
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "# Wrong bytes         : 0 OK")) << outcome.output;
}

TEST(PutMode, AllPolicies_AreCorrect) {
  const Arguments policies{"--policy", "all", "--layers", "1", "--iters", "2"};
  for (const Arguments& shape :
       {Arguments{"--ranks", "2", "--api", "13"}, Arguments{"--ranks", "4", "--ops-per-group", "6", "--delay", "2"},
        Arguments{"--ranks", "4", "--schedule", "batched"},
        Arguments{"--ranks", "8", "--preset", "dsv3-fp8", "--scale", "65536"}}) {
    Arguments arguments = policies;
    arguments.insert(arguments.end(), shape.begin(), shape.end());
    expect_correct_puts(run_put(arguments));
  }
  expect_correct_puts(run_put({"--ranks", "1"}));
}

TEST(PutMode, OverNccl_IsCorrect) {
  for (const char* const ranks : {"2", "4"}) {
    for (const char* const limit : {"0", "6"}) {
      expect_correct_puts(
          run_put_over_nccl({"--policy", "all", "--layers", "1", "--ranks", ranks, "--ops-per-group", limit}));
    }
  }
}

TEST(PutMode, InjectedFault_IsFound) {
  for (const char* const fault : {"flip-byte", "wrong-slot", "drop-duplicate", "write-guard"}) {
    for (const auto run_over : {run_put, run_put_over_nccl}) {
      const Outcome outcome = run_over({"--inject", fault, "--policy", "hot", "--ranks", "4"}, {});
      EXPECT_EQ(kWrong, outcome.status) << outcome.output;
      EXPECT_TRUE(contains(outcome, "first wrong byte: rank ")) << outcome.output;
    }
  }
  // The sender names the destination: there is no receive to exchange.
  EXPECT_EQ(kUsage, run_put({"--inject", "swap-receives", "--ranks", "4"}).status);
}

TEST(PutMode, OneSpoiledCall_IsFound) {
  const std::vector<std::pair<std::string, std::string>> found{
      {"flip-byte", "first wrong byte"}, {"short", "first wrong byte"},
      {"elsewhere", "first wrong byte"}, {"no-data", "first wrong byte"},
      {"value", "the signals of rank "}, {"extra", "the word behind the signals of rank "}};
  const auto run_spoiled = [](const std::string& mode) {
    return run_put(
        {"--preset", "dsv3-fp8", "--scale", "4096", "--layers", "1", "--ranks", "2", "--plugin", setting("MUTATE_RMA")},
        {"MUTATE_PLUGIN=" + setting("EPLB_PLUGIN"), "MUTATE_MODE=" + mode, "MUTATE_NTH=3"});
  };
  expect_correct_puts(run_spoiled("none"));
  for (const auto& [mode, text] : found) {
    const Outcome outcome = run_spoiled(mode);
    EXPECT_EQ(kWrong, outcome.status) << mode << outcome.output;
    EXPECT_TRUE(contains(outcome, text)) << mode << outcome.output;
  }
  const Outcome flipped = run_put_over_nccl({"--ranks", "2"}, {"HOST_NCCL_FLIP=5"});
  EXPECT_EQ(kWrong, flipped.status) << flipped.output;
}

TEST(PutMode, ComparedWithOtherModes_NeedsTheBuffersOfDirect) {
  const std::string file = testing::TempDir() + "eplb-modes-" + std::to_string(::getpid()) + ".json";
  for (const auto& [run_over, second] : {std::pair(&run_put, "direct"), std::pair(&run_put_over_nccl, "per-tensor")}) {
    const Outcome outcome = run_over({"--compare", "modes", "--rounds", "1", "--ranks", "2", "--json", file}, {});
    const auto json = nlohmann::json::parse(std::ifstream(file), nullptr, false);
    ::unlink(file.c_str());
    ASSERT_EQ(kCorrect, outcome.status) << outcome.output;
    EXPECT_TRUE(contains(outcome, "buffers MiB")) << outcome.output;
    ASSERT_EQ(3U, json.size());
    EXPECT_EQ("packed", json[0]["over"]);
    EXPECT_EQ(second, json[1]["over"].get<std::string>());
    EXPECT_EQ("put", json[2]["over"]);
    for (const auto& rank : json[2]["last_run"]["by_rank"]) {
      EXPECT_EQ(run_over == &run_put ? "equal" : "absent", rank["stats"].get<std::string>());
    }
    EXPECT_LT(0, json[0]["last_run"]["memory"]["send_bytes"]);
    EXPECT_EQ(0, json[2]["last_run"]["memory"]["send_bytes"]);
    EXPECT_EQ(0, json[2]["last_run"]["memory"]["recv_bytes"]);
    EXPECT_EQ(json[1]["last_run"]["memory"]["new_rows_bytes"], json[2]["last_run"]["memory"]["new_rows_bytes"]);
  }
}

TEST(PutMode, WithoutRma_SaysWhatToDo) {
  const Outcome other = run_put({"--ranks", "2", "--plugin", setting("EPLB_OTHER_PLUGIN")});
  EXPECT_EQ(kFailed, other.status) << other.output;
  EXPECT_TRUE(contains(other, "does not export an RMA table. Next: ")) << other.output;
  const Outcome off = run_put({"--ranks", "2"}, {"VERBATIM_RMA=0"});
  EXPECT_EQ(kFailed, off.status) << off.output;
  EXPECT_TRUE(contains(off, "look at VERBATIM_RMA")) << off.output;
  for (const Arguments& arguments : {Arguments{"--memory", "cuda"}, Arguments{"--api", "12"}}) {
    const Outcome refused = run_put(arguments);
    EXPECT_EQ(kUsage, refused.status) << refused.output;
    EXPECT_TRUE(contains(refused, arguments.front())) << refused.output;
  }
}

}  // namespace
}  // namespace verbatim::eplb
