// verbatim-kv with --memory cuda: caches from GPU memory to GPU memory over a plugin's table, the staged copy of a
// failed transfer included, and a clear error where that is not possible.
#include "kv_run.h"

namespace verbatim::kv {
namespace {

using Arguments = std::vector<std::string>;

KvRun run_in_gpu_memory(const Arguments& more) {
  Arguments arguments{"--requests",
                      "12",
                      "--tokens",
                      "300",
                      "--scale",
                      "40",
                      "--memory",
                      "cuda",
                      "--cuda",
                      setting("KV_CUDA"),
                      "--plugin",
                      setting("KV_CUDA_PLUGIN"),
                      "--request-timeout-ms",
                      "5000"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_kv(arguments);
}

void expect_gpu_memory(const KvRun& run) {
  EXPECT_EQ("cuda", run.report["memory"]) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("# memory of rank 0: GPU 0 of ")) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("), " + setting("KV_REGISTERED_BY") + "\n")) << run.output;
}

struct GpuShape {
  const char* name;
  Arguments arguments;
};

class ShapeInGpuMemory : public testing::TestWithParam<GpuShape> {};
INSTANTIATE_TEST_SUITE_P(
    Kv, ShapeInGpuMemory,
    testing::Values(GpuShape{"DeepSeek", {"--preset", "deepseek-mla-bf16", "--fragmentation", "0"}},
                    GpuShape{"Llama4Ratio2",
                             {"--preset", "llama-70b-tp4", "--tp-ratio", "2", "--decode", "2", "--lf", "indexer"}},
                    GpuShape{"TwoByTwo", {"--prefill", "2", "--decode", "2", "--allocations", "family"}},
                    GpuShape{"AllocationPerLayer", {"--allocations", "layer"}},
                    GpuShape{"OneAtATime", {"--concurrency", "1", "--depth", "1", "--group", "1"}}),
    [](const auto& tested) { return tested.param.name; });

TEST_P(ShapeInGpuMemory, AnyShape_IsServedAsPlanned) {
  const KvRun run = run_in_gpu_memory(GetParam().arguments);
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_gpu_memory(run);
  for (const Json& family : run.report["families"]) expect_plan(run, family["name"]);
}

TEST(GpuMemory, ConnectionKilledTwice_IsServedByAStagedCopy) {
  const KvRun run = run_in_gpu_memory({"--inject", "kill,family=lf,request=5,times=2"});
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_gpu_memory(run);
  EXPECT_LE(1, run.family("lf")["staged_copies"]) << run.output;
  for (const char* family : {"kv", "lf"}) {
    EXPECT_EQ(12, run.family(family)["served"]) << run.output;
    EXPECT_EQ(0, run.family(family)["wrong_bytes"]) << run.output;
    EXPECT_EQ(0, run.family(family)["crc_errors"]) << run.output;
  }
}

// These tests need memory that the CPU can access: the socket plugin loses the data of flushes, the mutating plugin
// writes to the memory itself.
KvRun run_over_socket(const Arguments& more, const std::vector<std::string>& environment) {
  Arguments arguments{"--requests", "6",        "--tokens", "300",    "--scale",
                      "40",         "--memory", "cuda",     "--cuda", setting("HOST_CUDA")};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_kv(arguments, environment);
}

TEST(GpuMemory, DataThatDoesNotArrive_IsFound) {
  const KvRun run = run_over_socket({"--plugin", setting("SOCKET_PLUGIN")}, {"SOCKET_PLUGIN_CUDA=lose"});
  EXPECT_EQ(kWrong, run.status) << run.output;
  EXPECT_LT(0, run.family("kv")["wrong_bytes"]) << run.output;
  EXPECT_EQ(6, run.family("kv")["crc_errors"]) << run.output;
}

// One request at a time, no two of its blocks adjacent: otherwise the flush of the next block could overwrite the byte.
TEST(GpuMemory, WriteBeyondBlock_IsFound) {
  const KvRun run = run_over_socket(
      {"--plugin", setting("MUTATE"), "--fragmentation", "1", "--concurrency", "1"},
      {"SOCKET_PLUGIN_CUDA=flush", "MUTATE_PLUGIN=" + setting("SOCKET_PLUGIN"), "MUTATE_MODE=overrun", "MUTATE_NTH=1"});
  EXPECT_EQ(kWrong, run.status) << run.output;
}

TEST(NoGpuMemory, MissingPart_IsAClearError) {
  const auto expect_refused = [](const KvRun& run, const std::string& why) {
    EXPECT_EQ(kFailed, run.status) << run.output;
    EXPECT_NE(std::string::npos, run.output.find("--memory cuda: " + why)) << run.output;
    EXPECT_NE(std::string::npos, run.output.find("Next: ")) << run.output;
  };
  const Arguments plugin{"--plugin", setting("SOCKET_PLUGIN")};
  expect_refused(run_kv({"--plugin", setting("SOCKET_PLUGIN"), "--memory", "cuda", "--cuda", "/no/libcuda.so.1"}),
                 "cannot open the library: /no/libcuda.so.1");
  expect_refused(run_over_socket(plugin, {"HOST_CUDA_GPUS=0"}), "this machine has no GPU");
  expect_refused(run_over_socket(plugin, {"SOCKET_PLUGIN_CUDA="}),
                 "device socket0 of the plugin takes host memory only");
}

TEST(NoGpuMemory, OverNccl_IsRefused) {
  const KvRun run = run_kv({"--mode", "nccl", "--memory", "cuda"});
  EXPECT_EQ(kUsage, run.status) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("NCCL always uses GPU memory")) << run.output;
}

}  // namespace
}  // namespace verbatim::kv
