// verbatim-perf must fail when the plugin corrupts one message of a run.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "perf_run.h"

namespace verbatim::perf {
namespace {

Outcome run_mutated(const std::string& mode, int nth, std::vector<std::string> arguments,
                    const std::string& only = "") {
  arguments.insert(arguments.end(), {"--plugin", setting("MUTATE"), "--timeout", "60", "-n", "2", "-w", "0"});
  return run(arguments, {"MUTATE_PLUGIN=" + setting("PERF_PLUGIN"), "MUTATE_MODE=" + mode,
                         "MUTATE_NTH=" + std::to_string(nth), "MUTATE_ONLY=" + only});
}

TEST(Mutation, NoMutation_IsCorrect) {
  const Outcome outcome = run_mutated("none", 1, {"sendrecv", "-b", "1K", "-e", "1K"});
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
}

class MutatedOperation : public testing::TestWithParam<std::string> {
 protected:
  // At least four messages for each rank, so that there is a third one to corrupt. A sum of integers hides no bit.
  std::vector<std::string> several_messages() {
    std::vector<std::string> arguments{GetParam(), "-b", "40000", "-e", "40000", "--chunk", "4K", "-d", "uint32"};
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

// The part of rank 1 of three is before that of rank 2, which rank 1 must leave as it is. In place the fourth message
// of a rank is the checked one: the first run has three.
TEST(Mutation, WriteBesideResult_IsFound) {
  std::vector<std::string> arguments{"scatter", "--procs", "3", "-b", "30000", "-e", "30000"};
  const Outcome outcome = run_mutated("overrun", 1, arguments);
  EXPECT_NE(std::string::npos, outcome.output.find("rank 1, iteration 1: 1 wrong elements in the receive buffer"))
      << outcome.output;
  arguments.insert(arguments.end(), {"--format", "nccl-tests"});
  const Outcome in_place = run_mutated("overrun", 4, arguments);
  EXPECT_NE(std::string::npos, in_place.output.find("rank 1, iteration 3: 1 wrong elements in the receive buffer"))
      << in_place.output;
}

TEST(Mutation, OneFlippedBitInPlace_IsFound) {
  for (const char* operation : {"all_gather", "reduce_scatter"}) {
    const std::vector<std::string> arguments{operation, "-b",     "1K",       "-e",        "1K",
                                             "-d",      "uint32", "--format", "nccl-tests"};
    EXPECT_EQ(kCorrect, run_mutated("none", 4, arguments).status);
    const Outcome outcome = run_mutated("flip-byte", 4, arguments);
    EXPECT_EQ(kWrong, outcome.status) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find("# Out of bounds values : 2 FAILED\n")) << outcome.output;
  }
}

TEST(Mutation, Unalign_MovesBuffers) {
  std::vector<std::string> arguments{"sendrecv", "-b", "1K", "-e", "1K"};
  EXPECT_EQ(kCorrect, run_mutated("wrong-size", 1, arguments, "unaligned").status);
  arguments.insert(arguments.end(), {"-u", "3"});
  EXPECT_EQ(kFailed, run_mutated("wrong-size", 1, arguments, "unaligned").status);
}

TEST(Mutation, WithoutChecks_AllSizesAreFilled) {
  const std::vector<std::string> arguments{"sendrecv", "-b", "8", "-e", "64K", "-f", "8192", "-c", "0"};
  const Outcome outcome = run_mutated("wrong-size", 1, arguments, "zeros");
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
}

TEST(Mutation, WrongSendSize_IsFound) {
  const Outcome outcome = run_mutated("wrong-send-size", 2, {"sendrecv", "-b", "1K", "-e", "1K"});
  EXPECT_EQ(kFailed, outcome.status) << outcome.output;
}

}  // namespace
}  // namespace verbatim::perf
