// All presets, policies, rank counts and modes of verbatim-eplb at a small scale: every byte is correct, and all counts
// match the plan.
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>

#include "eplb_run.h"
#include "netapi/plugin.h"

namespace verbatim::eplb {
namespace {

using Json = nlohmann::json;

struct Scaled {
  const char* preset;
  const char* scale;
};
constexpr Scaled kPresets[] = {
    {"dsv3-fp8", "65536"}, {"dsv3-bf16", "65536"}, {"dsv3-nvfp4", "16384"}, {"tiny-mixed", "1"}};

void expect_correct(const Outcome& outcome) {
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "# Wrong bytes         : 0 OK")) << outcome.output;
}

class EveryMode : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Eplb, EveryMode,
                         testing::Values("per-tensor", "packed", "batched", "batched-per-tensor", "direct"),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(EveryMode, AllPresetsAndPolicies_AreCorrect) {
  int seed = 1;
  for (const Scaled& scaled : kPresets) {
    for (const char* ranks : {"2", "4", "8"}) {
      expect_correct(
          run_over_plugin({"--mode", GetParam(), "--preset", scaled.preset, "--scale", scaled.scale, "--policy", "all",
                           "--layers", "1", "--ranks", ranks, "--seed", std::to_string(seed++)}));
    }
  }
}

// --schedule batched with every mode, including direct, which has no mode of its own for batches.
TEST_P(EveryMode, BatchedSchedule_IsCorrect) {
  const std::string mode = GetParam();
  for (const char* ranks : {"2", "4", "8"}) {
    expect_correct(run_over_plugin(
        {"--mode", mode, "--schedule", "batched", "--policy", "shuffle,hot,rotate", "--ranks", ranks, "--delay", "2"}));
  }
}

TEST_P(EveryMode, SmallGroupsAndDelays_AreCorrect) {
  expect_correct(run_over_plugin({"--mode", GetParam(), "--policy", "hot,shuffle", "--ranks", "4", "--ops-per-group",
                                  "6", "--delay", "3", "--depth", "1", "--chunk", "1K", "--iters", "2"}));
}

TEST_P(EveryMode, OneRank_IsCorrect) {
  expect_correct(run_over_plugin({"--mode", GetParam(), "--policy", "shuffle", "--ranks", "1"}));
}

TEST(Seeds, DifferentSeeds_AreCorrect) {
  for (int seed = 100; seed < 110; ++seed) {
    expect_correct(run_over_plugin({"--mode", seed % 2 == 0 ? "packed" : "direct", "--policy", "all", "--ranks", "4",
                                    "--layers", "10", "--seed", std::to_string(seed)}));
  }
}

TEST(StarGroups, HotPolicy_DoesNotDeadlock) {
  expect_correct(run_over_plugin({"--mode", "per-tensor", "--policy", "hot", "--ranks", "4", "--ops-per-group", "6",
                                  "--layers", "5", "--iters", "20"}));
}

TEST(Tables, EveryTableVersion_IsCorrect) {
  for (int version = netapi::kOldestVersion; version <= netapi::kNewestVersion; ++version) {
    if (netapi::open_plugin(setting("EPLB_PLUGIN"), version).plugin == nullptr) continue;
    expect_correct(run_over_plugin({"--mode", "direct", "--ranks", "2", "--api", std::to_string(version)}));
  }
}

class JsonReport : public testing::Test {
 protected:
  ~JsonReport() override { ::unlink(file_.c_str()); }

  Json report(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--json", file_});
    expect_correct(run_over_plugin(arguments));
    return Json::parse(std::ifstream(file_), nullptr, false);
  }

  const std::string file_ = testing::TempDir() + "eplb-" + std::to_string(::getpid()) + ".json";
};

TEST_F(JsonReport, PackedMode_SendBufferIsOneLayer) {
  for (const std::size_t ranks : {2U, 8U}) {
    const Json json = report({"--preset", "dsv3-fp8", "--scale", "65536", "--layers", "1", "--ranks",
                              std::to_string(ranks), "--policy", "shuffle"});
    const std::size_t layer = json["expert_bytes"].get<std::size_t>() * 288 / ranks;
    EXPECT_EQ(layer, json["memory"]["send_bytes"]);
    EXPECT_EQ(layer, json["memory"]["new_rows_bytes"]);
    EXPECT_EQ(ranks * layer, json["memory"]["old_design_send_bytes"]);
    EXPECT_EQ((ranks + 2) * layer, json["memory"]["old_design_all_buffers_bytes"]);
    // The tool adds guards: at this scale about as many bytes as the rows, at full scale few in comparison.
    EXPECT_LT(json["memory"]["send_bytes"], json["memory"]["allocated_with_guards_bytes"]);
  }
}

TEST_F(JsonReport, DirectMode_HasNoExtraBuffer) {
  const Json json = report({"--mode", "direct", "--ranks", "4"});
  EXPECT_EQ(0, json["memory"]["send_bytes"]);
  EXPECT_EQ(0, json["memory"]["recv_bytes"]);
  EXPECT_EQ(json["memory"]["weights_bytes"], json["memory"]["new_rows_bytes"]);
}

TEST_F(JsonReport, PacksAndGroupedReceives_AreCounted) {
  const Json packed = report({"--mode", "packed", "--policy", "hot", "--ranks", "4"});
  std::uint64_t experts = 0;
  std::uint64_t planned = 0;
  std::uint64_t packs = 0;
  for (const Json& layer : packed["layers"]) {
    experts += layer["experts"].get<std::uint64_t>();
    planned += layer["packs"].get<std::uint64_t>();
  }
  for (const Json& rank : packed["by_rank"]) packs += rank["packs"].get<std::uint64_t>();
  EXPECT_EQ(planned, packs);
  EXPECT_LT(packs, experts) << "an expert that several ranks need is packed once";

  const Json direct = report({"--mode", "direct", "--policy", "hot", "--ranks", "4"});
  const auto members = direct["transport"]["members_of_a_receive"].get<std::uint64_t>();
  const std::uint64_t tensors = direct["tensors"].size();
  std::uint64_t grouped = 0;
  for (const Json& rank : direct["by_rank"]) grouped += rank["grouped_receives"].get<std::uint64_t>();
  // A last receive of only one member is not a grouped receive.
  const std::uint64_t per_expert = tensors / members + (tensors % members > 1 ? 1 : 0);
  EXPECT_EQ(members == 1 ? 0 : experts * per_expert, grouped);
}

TEST_F(JsonReport, PluginStats_AreCompared) {
  const Json json = report({"--policy", "all", "--ranks", "4", "--layers", "2", "--iters", "2"});
  std::ostringstream plugin;
  plugin << std::ifstream(setting("EPLB_PLUGIN"), std::ios::binary).rdbuf();
  const bool has_stats = plugin.str().find("VERBATIM_STATS") != std::string::npos;
  for (const Json& rank : json["by_rank"]) EXPECT_EQ(has_stats ? "equal" : "absent", rank["stats"]);
}

TEST(CompareOption, TwoPlugins_PrintsMedians) {
  const Outcome outcome = run({"--compare", setting("EPLB_PLUGIN") + "," + setting("EPLB_OTHER_PLUGIN"), "--rounds",
                               "2", "--ranks", "2", "--timeout", "60"});
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "medians of 2 rounds")) << outcome.output;
  EXPECT_TRUE(contains(outcome, "libnccl-net-verbatim.so")) << outcome.output;
  EXPECT_TRUE(contains(outcome, "socket")) << outcome.output;
}

TEST(CompareOption, Schedules_RunsBoth) {
  const std::string file = testing::TempDir() + "eplb-schedules-" + std::to_string(::getpid()) + ".json";
  const Outcome outcome =
      run_over_plugin({"--compare", "schedules", "--mode", "direct", "--rounds", "2", "--ranks", "4", "--json", file});
  const Json json = Json::parse(std::ifstream(file), nullptr, false);
  ::unlink(file.c_str());
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "schedule all")) << outcome.output;
  EXPECT_TRUE(contains(outcome, "schedule batched")) << outcome.output;
  ASSERT_EQ(2U, json.size()) << outcome.output;
  for (const Json& entry : json) EXPECT_EQ(entry["over"], entry["last_run"]["schedule"]);
  EXPECT_LT(json[0]["last_run"]["layers"][0]["groups"], json[1]["last_run"]["layers"][0]["groups"]);
}

TEST(CompareOption, BatchedModeAndSchedules_IsRejected) {
  EXPECT_EQ(kUsage, run_over_plugin({"--mode", "batched", "--compare", "schedules"}).status);
  EXPECT_EQ(kUsage, run_over_plugin({"--mode", "batched", "--schedule", "all"}).status);
}

TEST(CompareOption, MissingPlugin_EndsWithItsError) {
  const Outcome outcome = run({"--compare", "/does/not/exist.so", "--rounds", "1", "--ranks", "2"});
  EXPECT_EQ(kFailed, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "/does/not/exist.so")) << outcome.output;
}

}  // namespace
}  // namespace verbatim::eplb
