// verbatim-perf must fail when the plugin corrupts one message of a run.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "perf_run.h"

namespace verbatim::perf {
namespace {

Outcome run_mutated(const std::string& mode, int nth, std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--plugin", setting("MUTATE"), "--timeout", "60", "-n", "2", "-w", "0"});
  return run(arguments,
             {"MUTATE_PLUGIN=" + setting("PERF_PLUGIN"), "MUTATE_MODE=" + mode, "MUTATE_NTH=" + std::to_string(nth)});
}

TEST(Mutation, NoMutation_IsCorrect) {
  const Outcome outcome = run_mutated("none", 1, {"sendrecv", "-b", "1K", "-e", "1K"});
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
}

class MutatedOperation : public testing::TestWithParam<std::string> {
 protected:
  // At least four messages for each rank, so that there is a third one to corrupt.
  std::vector<std::string> several_messages() {
    std::vector<std::string> arguments{GetParam(), "-b", "40000", "-e", "40000", "--chunk", "4K"};
    if (GetParam() == "grouped") arguments.insert(arguments.end(), {"--group", "4"});
    return arguments;
  }
};
INSTANTIATE_TEST_SUITE_P(Perf, MutatedOperation,
                         testing::Values("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
                                         "alltoall", "alltoallv", "gather", "scatter", "hypercube", "sendrecv",
                                         "stream", "pingpong", "grouped"),
                         [](const auto& tested) { return tested.param; });

TEST_P(MutatedOperation, OneFlippedBit_IsFound) {
  for (const int nth : {1, 3}) {
    const Outcome outcome = run_mutated("flip-byte", nth, several_messages());
    EXPECT_EQ(kWrong, outcome.status) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find("instead of")) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find("FAILED")) << outcome.output;
  }
}

TEST_P(MutatedOperation, SkippedTail_IsFound) {
  for (const int nth : {1, 3}) {
    const Outcome outcome = run_mutated("skip-tail", nth, several_messages());
    EXPECT_EQ(kWrong, outcome.status) << outcome.output;
  }
}

TEST_P(MutatedOperation, WrongSize_IsFound) {
  const Outcome outcome = run_mutated("wrong-size", 3, several_messages());
  EXPECT_EQ(kFailed, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("test reported")) << outcome.output;
}

TEST(Mutation, SwappedGroupMembers_AreFound) {
  const Outcome outcome = run_mutated("swap-members", 1, {"grouped", "-b", "8K", "-e", "8K", "--group", "4"});
  EXPECT_EQ(kWrong, outcome.status) << outcome.output;
}

TEST(Mutation, WriteBeyondData_IsFound) {
  const Outcome outcome = run_mutated("overrun", 1, {"sendrecv", "-b", "1000", "-e", "64K", "-f", "100"});
  EXPECT_EQ(kWrong, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("outside of a buffer")) << outcome.output;
}

// The fourth message of a rank is the checked one of the run in place: the first run has three.
TEST(Mutation, OneFlippedBitInPlace_IsFound) {
  const std::vector<std::string> arguments{"all_gather", "-b", "1K", "-e", "1K", "--format", "nccl-tests"};
  EXPECT_EQ(kCorrect, run_mutated("none", 4, arguments).status);
  const Outcome outcome = run_mutated("flip-byte", 4, arguments);
  EXPECT_EQ(kWrong, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("# Out of bounds values : 2 FAILED\n")) << outcome.output;
}

TEST(Mutation, WrongSendSize_IsFound) {
  const Outcome outcome = run_mutated("wrong-send-size", 2, {"sendrecv", "-b", "1K", "-e", "1K"});
  EXPECT_EQ(kFailed, outcome.status) << outcome.output;
}

}  // namespace
}  // namespace verbatim::perf
