// verbatim-kv --mode put: over the RMA table of the plugin that KV_PLUGIN names.
#include <algorithm>

#include "kv_run.h"

namespace verbatim::kv {
namespace {

using Arguments = std::vector<std::string>;

KvRun run_put(Arguments more, std::vector<std::string> environment = {}) {
  Arguments arguments{"--mode", "put", "--requests", "12", "--tokens", "300", "--scale", "40"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_kv(arguments, std::move(environment));
}

TEST(PutMode, AnyShape_IsServedAsPlanned) {
  const std::vector<Arguments> shapes{
      {"--prefill", "2", "--decode", "2", "--allocations", "family", "--warmup", "4"},
      {"--preset", "deepseek-mla-fp8", "--tp-ratio", "2", "--decode", "2", "--allocations", "layer", "--lf-first"},
      {"--preset", "llama-70b-tp4", "--tp-ratio", "2", "--decode", "2", "--api", "13"},
      {"--concurrency", "1", "--fragmentation", "1", "--hit", "0.5", "--blocks", "24"}};
  for (const Arguments& shape : shapes) {
    const KvRun run = run_put(shape);
    ASSERT_EQ(kOk, run.status) << run.output;
    EXPECT_EQ("put", run.report["mode"]);
    for (const Json& family : run.report["families"]) expect_plan(run, family["name"]);
    for (const Json& rank : run.report["ranks"]) EXPECT_EQ("equal", rank["plugin_counters"]);
  }
}

TEST(PutMode, SameRequests_HaveTheContentsOfDirect) {
  const KvRun put = run_put({});
  const KvRun direct = run_put({"--mode", "direct"});
  for (const char* const family : {"kv", "lf"})
    EXPECT_EQ(direct.family(family)["crc_sum"], put.family(family)["crc_sum"]);
}

TEST(PutMode, InvalidLists_AreRejectedBeforeAnythingIsPosted) {
  const KvRun run = run_put({"--inject", "unregistered,family=lf", "--inject", "overlapping-destination"});
  EXPECT_EQ(kRejected, run.status) << run.output;
  for (const char* const name : {"kv", "lf"}) {
    const Json& family = run.family(name);
    ASSERT_EQ(2U, family["rejected"].size()) << run.output;
    EXPECT_EQ(10, family["served"]);
    EXPECT_EQ(10, family["notifications"]);
    EXPECT_EQ(0, family["wrong_bytes"]);
  }
}

// A plugin in front of KV_PLUGIN spoils one call.
TEST(PutMode, OneSpoiledCall_IsFound) {
  const auto run_spoiled = [](const std::string& mode) {
    return run_put({"--plugin", setting("MUTATE_RMA")},
                   {"MUTATE_PLUGIN=" + setting("KV_PLUGIN"), "MUTATE_MODE=" + mode, "MUTATE_NTH=2"});
  };
  const KvRun unspoiled = run_spoiled("none");
  EXPECT_EQ(kOk, unspoiled.status) << unspoiled.output;
  const std::vector<std::pair<std::string, std::string>> found{{"flip-byte", " instead of "},
                                                               {"short", " instead of "},
                                                               {"elsewhere", " instead of "},
                                                               {"no-data", " instead of "},
                                                               {"value", "the signal word of request "},
                                                               {"extra", "of the signals is 1 instead of 0"}};
  for (const auto& [mode, text] : found) {
    const KvRun run = run_spoiled(mode);
    EXPECT_EQ(kWrong, run.status) << mode << run.output;
    EXPECT_NE(std::string::npos, run.output.find(text)) << mode << run.output;
  }
}

TEST(PutMode, ComparedWithDirect_PrintsBoth) {
  const KvRun run = run_kv({"--compare", "modes", "--plugin", setting("KV_PLUGIN"), "--rounds", "1", "--requests", "12",
                            "--tokens", "300", "--scale", "40"});
  ASSERT_EQ(kOk, run.status) << run.output;
  ASSERT_EQ(2U, run.report.size());
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(i == 0 ? "direct" : "put", run.report[i]["over"]);
    EXPECT_EQ(run.report[i]["over"], run.report[i]["last_run"]["mode"]);
    EXPECT_EQ(0, run.report[i]["last_run"]["wrong"]);
    EXPECT_LT(0, run.report[i]["families"][0]["ratio"]);
  }
}

KvRun run_puts_of_nccl(Arguments more, std::vector<std::string> environment = {}) {
  more.insert(more.end(), {"--mode", "nccl-put", "--nccl", setting("HOST_NCCL"), "--cuda", setting("HOST_CUDA")});
  return run_put(more, std::move(environment));
}

TEST(PutMode, ThroughNccl_IsServedAsPlanned) {
  for (const Arguments& shape : {Arguments{"--prefill", "2", "--decode", "2"},
                                 Arguments{"--preset", "llama-70b-tp4", "--tp-ratio", "2", "--decode", "2"}}) {
    const KvRun run = run_puts_of_nccl(shape);
    ASSERT_EQ(kOk, run.status) << run.output;
    EXPECT_EQ("cuda", run.report["memory"]);
    for (const Json& family : run.report["families"]) expect_plan(run, family["name"]);
  }
  const KvRun flipped = run_puts_of_nccl({}, {"HOST_NCCL_FLIP=5"});
  EXPECT_EQ(kWrong, flipped.status) << flipped.output;
  EXPECT_NE(std::string::npos, flipped.output.find(" instead of ")) << flipped.output;
  const KvRun rejected = run_puts_of_nccl({"--inject", "unregistered"});
  EXPECT_EQ(kRejected, rejected.status) << rejected.output;
}

TEST(PutMode, NoRmaTable_SaysWhatToDo) {
  const KvRun other = run_put({"--plugin", setting("SOCKET_PLUGIN")});
  EXPECT_EQ(kFailed, other.status) << other.output;
  EXPECT_NE(std::string::npos, other.output.find("does not export an RMA table")) << other.output;
  EXPECT_NE(std::string::npos, other.output.find("Next: ")) << other.output;
  const KvRun off = run_put({}, {"VERBATIM_RMA=0"});
  EXPECT_EQ(kFailed, off.status) << off.output;
  EXPECT_NE(std::string::npos, off.output.find("VERBATIM_RMA")) << off.output;
}

TEST(PutMode, OptionsWithoutMeaning_AreRefused) {
  const std::vector<Arguments> refused{
      {"--memory", "cuda"}, {"--idle", "kv"}, {"--inject", "kill"}, {"--api", "12"}, {"--isolation"}};
  for (const Arguments& arguments : refused) {
    const KvRun run = run_put(arguments);
    EXPECT_EQ(kUsage, run.status) << run.output;
    EXPECT_NE(std::string::npos, run.output.find(arguments.front())) << run.output;
  }
}

}  // namespace
}  // namespace verbatim::kv
