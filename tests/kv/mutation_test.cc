// verbatim-kv must fail when the plugin corrupts one message of a run.
#include "kv_run.h"

namespace verbatim::kv {
namespace {

KvRun run_mutated(const std::string& mode, const std::string& nth) {
  return run_kv({"--plugin", setting("MUTATE"), "--requests", "6", "--tokens", "400", "--sigma", "0", "--scale", "40"},
                {"MUTATE_PLUGIN=" + setting("KV_PLUGIN"), "MUTATE_MODE=" + mode, "MUTATE_NTH=" + nth});
}

TEST(Mutation, NoMutation_IsCorrect) {
  const KvRun run = run_mutated("none", "1");
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_plan(run, "kv");
  expect_plan(run, "lf");
}

TEST(Mutation, OneFlippedBit_IsFound) {
  for (const char* const nth : {"1", "20"}) {
    const KvRun run = run_mutated("flip-byte", nth);
    EXPECT_EQ(kWrong, run.status) << run.output;
    EXPECT_NE(std::string::npos, run.output.find("instead of")) << run.output;
    EXPECT_EQ(1, run.family("kv")["wrong_bytes"].get<int>() + run.family("lf")["wrong_bytes"].get<int>());
    EXPECT_EQ(1, run.family("kv")["crc_errors"].get<int>() + run.family("lf")["crc_errors"].get<int>());
  }
}

TEST(Mutation, MissingTail_IsFound) {
  const KvRun run = run_mutated("skip-tail", "5");
  EXPECT_EQ(kWrong, run.status) << run.output;
}

TEST(Mutation, SwappedGroupMembers_AreFound) {
  const KvRun run = run_mutated("swap-members", "1");
  EXPECT_EQ(kWrong, run.status) << run.output;
}

// The byte after a block is the first byte of the next block, which belongs to this request, to another one, or to
// none. When the next block arrives after the byte was changed, the byte is right again, and there is nothing to find.
TEST(Mutation, WriteBeyondBlock_IsFound) {
  constexpr int kAttempts = 5;
  for (const char* const nth : {"1", "8", "20"}) {
    KvRun run = run_mutated("overrun", nth);
    for (int attempt = 1; attempt < kAttempts && run.status == kOk; ++attempt) run = run_mutated("overrun", nth);
    EXPECT_EQ(kWrong, run.status) << run.output;
  }
}

TEST(Mutation, WrongSize_IsFound) {
  const KvRun run = run_mutated("wrong-size", "3");
  EXPECT_EQ(kFailed, run.status) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("test reported")) << run.output;
}

}  // namespace
}  // namespace verbatim::kv
