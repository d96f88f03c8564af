// verbatim-perf with --memory cuda: every operation from GPU memory to GPU memory, and a clear error where there is no
// CUDA, no GPU, or a plugin that does not take GPU memory.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "perf_run.h"

namespace verbatim::perf {
namespace {

using Arguments = std::vector<std::string>;

Outcome run_in_gpu_memory(Arguments arguments, const PerfProcess::Environment& environment = {}) {
  arguments.insert(arguments.end(), {"--plugin", setting("PERF_PLUGIN"), "--memory", "cuda", "--cuda",
                                     setting("PERF_CUDA"), "--timeout", "60"});
  return run(arguments, environment);
}

void expect_correct_in_gpu_memory(const Outcome& outcome) {
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("# Wrong elements    : 0 OK")) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find(", GPU 0 of ")) << outcome.output;
}

class OperationInGpuMemory : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Perf, OperationInGpuMemory,
                         testing::Values("all_gather", "broadcast", "alltoall", "alltoallv", "gather", "scatter",
                                         "hypercube", "sendrecv", "stream", "pingpong", "grouped"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(OperationInGpuMemory, ZeroToSeveralChunks_IsCorrect) {
  expect_correct_in_gpu_memory(run_in_gpu_memory(
      {GetParam(), "-b", "0", "-e", "200K", "-f", "40", "-n", "2", "-w", "1", "--chunk", "24K", "--channels", "2"}));
}

TEST_P(OperationInGpuMemory, OneByteElements_AreCorrect) {
  expect_correct_in_gpu_memory(
      run_in_gpu_memory({GetParam(), "-b", "1", "-e", "9999", "-f", "9999", "-n", "3", "-w", "0", "-d", "uint8"}));
}

TEST(GpuMemory, SeveralRanks_AreCorrect) {
  for (const char* ranks : {"1", "3"}) {
    for (const char* operation : {"all_gather", "broadcast", "alltoall", "gather", "scatter", "sendrecv"}) {
      expect_correct_in_gpu_memory(run_in_gpu_memory(
          {operation, "--procs", ranks, "-b", "1000", "-e", "50000", "-f", "50", "-n", "2", "-w", "1"}));
    }
  }
}

// Content and guards are checked block by block.
TEST(GpuMemory, SeveralBlocksOfTheCheck_AreCorrect) {
  expect_correct_in_gpu_memory(run_in_gpu_memory({"sendrecv", "-b", "2500004", "-e", "2500004", "-n", "1", "-w", "0"}));
}

TEST(GpuMemory, Json_NamesTheMemory) {
  const std::string path = testing::TempDir() + "perf_" + std::to_string(getpid()) + ".json";
  expect_correct_in_gpu_memory(
      run_in_gpu_memory({"all_gather", "-b", "4K", "-e", "4K", "-n", "1", "-w", "0", "--json", path}));
  const auto json = nlohmann::json::parse(std::ifstream(path), nullptr, false);
  ::unlink(path.c_str());
  EXPECT_EQ("cuda", json["memory"]);
  for (const auto& rank : json["ranks"]) {
    EXPECT_TRUE(rank["memory"].get<std::string>().starts_with("GPU ")) << rank;
    EXPECT_EQ(setting("PERF_REGISTERED_BY"), rank["registered_by"].get<std::string>());
  }
}

TEST(GpuMemory, AllReduce_IsRefused) {
  const Outcome outcome = run_in_gpu_memory({"all_reduce"});
  EXPECT_EQ(kUsage, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("all_reduce reduces on the CPU and needs --memory host"))
      << outcome.output;
}

void expect_refused(const Outcome& outcome, const std::string& why) {
  EXPECT_EQ(kFailed, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("--memory cuda: " + why)) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("Next: ")) << outcome.output;
  EXPECT_EQ(std::string::npos, outcome.output.find("Wrong elements")) << outcome.output;
}

TEST(NoGpuMemory, WithoutCuda_IsAClearError) {
  expect_refused(
      run({"sendrecv", "--plugin", setting("PERF_PLUGIN"), "--memory", "cuda", "--cuda", "/no/libcuda.so.1"}),
      "cannot open the library: /no/libcuda.so.1");
}

TEST(NoGpuMemory, WithoutGpu_IsAClearError) {
  expect_refused(
      run({"sendrecv", "--plugin", setting("PERF_PLUGIN"), "--memory", "cuda", "--cuda", setting("HOST_CUDA")},
          {"HOST_CUDA_GPUS=0"}),
      "this machine has no GPU");
}

TEST(NoGpuMemory, PluginForHostMemory_IsAClearError) {
  const Outcome outcome =
      run({"sendrecv", "--plugin", setting("SOCKET_PLUGIN"), "--memory", "cuda", "--cuda", setting("HOST_CUDA")},
          {"SOCKET_PLUGIN_CUDA="});
  expect_refused(outcome, "device ");
  EXPECT_NE(std::string::npos, outcome.output.find(" of the plugin takes host memory only")) << outcome.output;
}

// The socket plugin can lose the data of a flush, and the mutating plugin writes to the memory itself, so these tests
// need memory that the CPU can access.
Outcome run_over_socket(const std::string& cuda, Arguments arguments, PerfProcess::Environment environment) {
  arguments.insert(arguments.end(), {"--memory", "cuda", "--cuda", setting("HOST_CUDA"), "-n", "2", "-w", "0"});
  environment.push_back("SOCKET_PLUGIN_CUDA=" + cuda);
  return run(arguments, environment);
}

TEST(GpuMemoryChecks, DataThatDoesNotArrive_IsFound) {
  for (const char* operation : {"all_gather", "alltoall", "sendrecv", "stream", "pingpong", "grouped"}) {
    const Outcome outcome =
        run_over_socket("lose", {operation, "--plugin", setting("SOCKET_PLUGIN"), "-b", "40K", "-e", "40K"}, {});
    EXPECT_EQ(kWrong, outcome.status) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find("wrong elements in the receive buffer")) << outcome.output;
  }
}

TEST(GpuMemoryChecks, WriteBeyondData_IsFound) {
  const Outcome outcome =
      run_over_socket("flush", {"sendrecv", "--plugin", setting("MUTATE"), "-b", "1000", "-e", "64K", "-f", "100"},
                      {"MUTATE_PLUGIN=" + setting("SOCKET_PLUGIN"), "MUTATE_MODE=overrun", "MUTATE_NTH=1"});
  EXPECT_EQ(kWrong, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("outside of a buffer")) << outcome.output;
}

}  // namespace
}  // namespace verbatim::perf
