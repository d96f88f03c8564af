// The NCCL mode of verbatim-kv without a GPU, with libraries for host memory in place of NCCL and CUDA.
#include <set>

#include "kv_run.h"

namespace verbatim::kv {
namespace {

KvRun run_nccl(std::vector<std::string> arguments, std::vector<std::string> environment = {}) {
  arguments.insert(arguments.end(), {"--mode", "nccl", "--nccl", setting("HOST_NCCL"), "--cuda", setting("HOST_CUDA"),
                                     "--tokens", "300", "--scale", "40"});
  return run_kv(std::move(arguments), std::move(environment));
}

TEST(NcclMode, OneCommunicatorPerFamily_ServesAsPlanned) {
  const KvRun run = run_nccl({"--requests", "40"});
  EXPECT_EQ(kOk, run.status) << run.output;
  for (const char* const name : {"kv", "lf"}) {
    expect_plan(run, name);
    EXPECT_EQ(40, run.family(name)["sent_messages"]) << "one message per request";
    EXPECT_EQ(2, run.family(name)["connections"]) << "one communicator per rank";
  }
}

TEST(NcclMode, SeveralRanksWithTpRatio_ServeAsPlanned) {
  const KvRun run = run_nccl({"--requests", "20", "--prefill", "2", "--decode", "4", "--tp-ratio", "2", "--preset",
                              "llama-70b-tp1", "--lf", "indexer", "--hit", "0.3", "--concurrency", "3"});
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_plan(run, "kv");
  expect_plan(run, "lf");
}

TEST(NcclMode, SameRequests_DeliverSameBytesAsDirectMode) {
  const KvRun nccl = run_nccl({"--requests", "12"});
  const KvRun direct = run_kv({"--requests", "12", "--tokens", "300", "--scale", "40"});
  // Both modes add the data to the CRC in the same order: layers, entries, blocks.
  EXPECT_EQ(direct.family("kv")["crc_sum"], nccl.family("kv")["crc_sum"]) << nccl.output;
  EXPECT_EQ(direct.family("lf")["crc_sum"], nccl.family("lf")["crc_sum"]) << nccl.output;
  EXPECT_EQ(direct.family("kv")["sent_bytes"], nccl.family("kv")["sent_bytes"]);
}

TEST(NcclMode, OneFlippedBit_IsFound) {
  const KvRun run = run_nccl({"--requests", "6"}, {"HOST_NCCL_FLIP=3"});
  EXPECT_EQ(kWrong, run.status) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("instead of")) << run.output;
}

TEST(NcclMode, EveryInvalidRequest_IsRejectedAtBothSides) {
  const std::vector<std::string> kinds{"wrong-family", "count-mismatch",     "length-mismatch",        "base-conflict",
                                       "unregistered", "index-out-of-range", "overlapping-destination"};
  std::vector<std::string> arguments{"--requests", "40"};
  for (const std::string& kind : kinds) arguments.insert(arguments.end(), {"--inject", kind});
  const KvRun run = run_nccl(arguments);
  EXPECT_EQ(kRejected, run.status) << run.output;
  std::set<std::pair<std::string, std::string>> found;
  for (const Json& rejection : run.family("kv")["rejected"])
    found.emplace(rejection["kind"].get<std::string>(), rejection["found_by"].get<std::string>());
  std::set<std::pair<std::string, std::string>> expected;
  for (const std::string& kind : kinds) {
    expected.insert({kind, "decode"});
    expected.insert({kind, "prefill"});
  }
  EXPECT_EQ(expected, found) << run.output;
  EXPECT_EQ(2 * kinds.size(), run.family("kv")["rejected"].size());
  EXPECT_EQ(40 - 2 * kinds.size(), run.family("kv")["sent_messages"]);
  expect_plan(run, "lf");
}

TEST(NcclMode, MissingLibrary_IsNamed) {
  const KvRun run = run_kv({"--mode", "nccl", "--nccl", "/no/libnccl.so", "--cuda", setting("HOST_CUDA")});
  EXPECT_EQ(kFailed, run.status) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("/no/libnccl.so")) << run.output;
}

}  // namespace
}  // namespace verbatim::kv
