// verbatim-eplb with --memory cuda: experts from GPU memory to GPU memory over a plugin's table, in every mode and
// schedule, and a clear error where that is not possible.
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "eplb_run.h"

namespace verbatim::eplb {
namespace {

using Json = nlohmann::json;

Outcome run_in_gpu_memory(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--plugin", setting("EPLB_CUDA_PLUGIN"), "--memory", "cuda", "--cuda",
                                     setting("EPLB_CUDA"), "--timeout", "100"});
  return run(arguments);
}

void expect_correct_in_gpu_memory(const Outcome& outcome) {
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "# Wrong bytes         : 0 OK")) << outcome.output;
  EXPECT_TRUE(contains(outcome, "# memory of rank 0: GPU 0 of ")) << outcome.output;
}

class ModeInGpuMemory : public testing::TestWithParam<std::tuple<const char*, const char*>> {};
INSTANTIATE_TEST_SUITE_P(Eplb, ModeInGpuMemory,
                         testing::Combine(testing::Values("per-tensor", "packed", "direct"),
                                          testing::Values("all", "batched")),
                         [](const auto& tested) {
                           std::string name = std::string(std::get<0>(tested.param)) + "_" + std::get<1>(tested.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(ModeInGpuMemory, AllPolicies_AreCorrect) {
  const auto& [mode, schedule] = GetParam();
  expect_correct_in_gpu_memory(run_in_gpu_memory(
      {"--mode", mode, "--schedule", schedule, "--policy", "all", "--layers", "1", "--ranks", "4", "--chunk", "1K"}));
}

TEST_P(ModeInGpuMemory, InjectedFaults_AreFound) {
  const auto& [mode, schedule] = GetParam();
  for (const char* fault : {"flip-byte", "drop-duplicate", "write-guard"}) {
    const Outcome outcome = run_in_gpu_memory(
        {"--mode", mode, "--schedule", schedule, "--policy", "hot", "--ranks", "4", "--inject", fault});
    EXPECT_EQ(kWrong, outcome.status) << fault << outcome.output;
    EXPECT_TRUE(contains(outcome, "first wrong byte: rank ")) << outcome.output;
  }
}

TEST(GpuMemory, Direct_NeedsNoStaging) {
  const std::string file = testing::TempDir() + "eplb-memory-" + std::to_string(::getpid()) + ".json";
  expect_correct_in_gpu_memory(run_in_gpu_memory({"--mode", "direct", "--ranks", "4", "--json", file}));
  const auto json = Json::parse(std::ifstream(file), nullptr, false);
  ::unlink(file.c_str());
  const Json& memory = json["memory"];
  const std::size_t layer = json["expert_bytes"].get<std::size_t>() * 8;
  EXPECT_EQ("cuda", memory["kind"]);
  EXPECT_EQ(0, memory["send_bytes"]);
  EXPECT_EQ(0, memory["recv_bytes"]);
  EXPECT_EQ(layer, memory["new_rows_bytes"]);
  EXPECT_EQ(layer, memory["vllm_bytes"]["pynccl"]);
  EXPECT_EQ(layer, memory["vllm_bytes"]["nixl_pr_41633"]);
  EXPECT_EQ(3 * layer, memory["vllm_bytes"]["nixl_pr_40013"]);
  EXPECT_EQ((4 + 2) * layer, memory["vllm_bytes"]["nixl_pr_36276"]);
  EXPECT_EQ(setting("EPLB_REGISTERED_BY"), json["transport"]["registered_by"].get<std::string>());
}

// Each rank sends to seven peers at the same time: more than the staging buffers of a host can hold at once.
TEST(GpuMemory, EightRanks_AreCorrect) {
  expect_correct_in_gpu_memory(run_in_gpu_memory({"--mode", "direct", "--preset", "dsv3-fp8", "--scale", "256",
                                                  "--layers", "1", "--policy", "greedy-drift", "--ranks", "8"}));
}

// The socket plugin can lose the data of a flush in memory that the CPU can access.
TEST(GpuMemory, DataThatDoesNotArrive_IsFound) {
  for (const char* mode : {"per-tensor", "packed", "direct"}) {
    const Outcome outcome = perf::PerfProcess({"--mode", mode, "--ranks", "2", "--plugin", setting("EPLB_OTHER_PLUGIN"),
                                               "--memory", "cuda", "--cuda", setting("HOST_CUDA"), "--timeout", "60"},
                                              {"SOCKET_PLUGIN_CUDA=lose"}, "EPLB_TOOL")
                                .finish();
    EXPECT_EQ(kWrong, outcome.status) << outcome.output;
  }
}

TEST(NoGpuMemory, MissingPart_IsAClearError) {
  const auto run_without = [](const std::string& cuda, std::vector<std::string> environment) {
    environment.emplace_back("SOCKET_PLUGIN_CUDA=");
    const Outcome outcome = perf::PerfProcess({"--ranks", "2", "--plugin", setting("EPLB_OTHER_PLUGIN"), "--memory",
                                               "cuda", "--cuda", cuda, "--timeout", "60"},
                                              environment, "EPLB_TOOL")
                                .finish();
    EXPECT_EQ(kFailed, outcome.status) << outcome.output;
    EXPECT_TRUE(contains(outcome, "Next: ")) << outcome.output;
    return outcome;
  };
  EXPECT_TRUE(
      contains(run_without("/no/libcuda.so.1", {}), "--memory cuda: cannot open the library: /no/libcuda.so.1"));
  EXPECT_TRUE(
      contains(run_without(setting("HOST_CUDA"), {"HOST_CUDA_GPUS=0"}), "--memory cuda: this machine has no GPU"));
  EXPECT_TRUE(contains(run_without(setting("HOST_CUDA"), {}),
                       "--memory cuda: device socket0 of the plugin takes host memory only"));
}

TEST(NoGpuMemory, OverNccl_IsRefused) {
  const Outcome outcome = run({"--over", "nccl", "--memory", "cuda"});
  EXPECT_EQ(kUsage, outcome.status) << outcome.output;
  EXPECT_TRUE(contains(outcome, "NCCL always uses GPU memory")) << outcome.output;
}

}  // namespace
}  // namespace verbatim::eplb
