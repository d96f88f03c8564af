// The modes of verbatim-eplb that use NCCL's calls, with libraries for host memory in place of NCCL and CUDA.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eplb_run.h"

namespace verbatim::eplb {
namespace {

Outcome run_over_nccl(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--over", "nccl", "--nccl", setting("HOST_NCCL"), "--cuda", setting("HOST_CUDA"),
                                     "--timeout", "60"});
  return run(arguments);
}

class EveryNcclMode : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Eplb, EveryNcclMode, testing::Values("per-tensor", "packed", "batched", "batched-per-tensor"),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(EveryNcclMode, AnyRankCountAndLimit_IsCorrect) {
  for (const char* ranks : {"2", "4", "8"}) {
    for (const char* limit : {"0", "12"}) {
      const Outcome outcome = run_over_nccl(
          {"--mode", GetParam(), "--policy", "all", "--layers", "2", "--ranks", ranks, "--ops-per-group", limit});
      EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
      EXPECT_TRUE(contains(outcome, "over NCCL 2.29.7")) << outcome.output;
    }
  }
}

TEST_P(EveryNcclMode, InjectedFault_IsFound) {
  for (const char* fault : {"flip-byte", "wrong-slot", "swap-receives", "drop-duplicate", "write-guard"}) {
    const Outcome outcome = run_over_nccl({"--mode", GetParam(), "--policy", "hot", "--ranks", "4", "--inject", fault});
    EXPECT_EQ(kWrong, outcome.status) << fault << outcome.output;
  }
}

TEST(MemoryUse, OverNccl_IsOneSendAndOneReceiveLayer) {
  const std::string file = testing::TempDir() + "eplb-nccl-" + std::to_string(::getpid()) + ".json";
  const Outcome outcome = run_over_nccl({"--ranks", "2", "--json", file});
  const auto json = nlohmann::json::parse(std::ifstream(file), nullptr, false);
  ::unlink(file.c_str());
  ASSERT_EQ(kCorrect, outcome.status) << outcome.output;
  const std::size_t layer = json["expert_bytes"].get<std::size_t>() * 16;
  EXPECT_EQ(layer, json["memory"]["send_bytes"]);
  EXPECT_EQ(layer, json["memory"]["recv_bytes"]);
  EXPECT_EQ(json["memory"]["allocated_with_guards_bytes"], json["memory"]["in_use_bytes"])
      << "no other buffer is allocated";
}

TEST(DirectMode, OverNccl_IsRejected) {
  EXPECT_EQ(kUsage, run_over_nccl({"--mode", "direct"}).status);
}

}  // namespace
}  // namespace verbatim::eplb
