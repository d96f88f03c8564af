// Invalid requests: the first side that can detect the error rejects the request, before any post, with the code of the
// error and the values that do not match. All other requests are served.
#include <map>
#include <memory>
#include <set>

#include "kv_run.h"

namespace verbatim::kv {
namespace {

struct Kind {
  const char* name;
  int code;
  std::vector<std::string> values;  // parts of the text
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{{"wrong-family", 1, {"family 1", "family 0"}},
                                     {"count-mismatch", 3, {"blocks in the list instead of"}},
                                     {"length-mismatch", 4, {"147456", "73728"}},
                                     {"base-conflict", 5, {"147456", "73728", "0x"}},
                                     {"unregistered", 6, {"layer 1", "0x"}},
                                     {"index-out-of-range", 7, {"block ", "position ", " blocks"}},
                                     {"overlapping-destination", 8, {"block ", "position 0", "again at position"}}};
  return all;
}

std::vector<std::string> arguments_for(const std::string& requests, const std::vector<std::string>& faults) {
  std::vector<std::string> arguments{"--requests", requests, "--tokens", "400", "--sigma", "0.2", "--scale", "40"};
  for (const std::string& fault : faults) arguments.insert(arguments.end(), {"--inject", fault});
  return arguments;
}

std::vector<std::string> all_kinds() {
  std::vector<std::string> faults;
  for (const Kind& kind : kinds()) faults.emplace_back(kind.name);
  return faults;
}

TEST(RequestRejection, EveryInvalidRequest_IsRejectedAtBothSides) {
  const KvRun run = run_kv(arguments_for("40", all_kinds()));
  EXPECT_EQ(kRejected, run.status) << run.output;
  const Json& kv = run.family("kv");
  ASSERT_EQ(2 * kinds().size(), kv["rejected"].size()) << run.output;
  std::set<int> codes;
  for (const Kind& kind : kinds()) {
    std::set<std::string> sides;
    for (const Json& refused : kv["rejected"]) {
      if (refused["kind"] != kind.name) continue;
      sides.insert(refused["found_by"]);
      codes.insert(refused["code"].get<int>());
      EXPECT_EQ(kind.code, refused["code"]);
      for (const std::string& value : kind.values) {
        EXPECT_NE(std::string::npos, refused["text"].get<std::string>().find(value)) << refused;
      }
    }
    EXPECT_EQ((std::set<std::string>{"decode", "prefill"}), sides) << kind.name;
  }
  EXPECT_EQ(kinds().size(), codes.size());
  EXPECT_EQ(40 - 2 * kinds().size(), kv["served"]);
  EXPECT_EQ(kv["served"], kv["notifications"]);
  EXPECT_EQ(0, kv["wrong_bytes"]);
  EXPECT_EQ(0, kv["fresh_connections"]);
  expect_plan(run, "lf");
}

TEST(RequestRejection, InvalidRequestsOfOneFamily_DoNotAffectOther) {
  std::vector<std::string> faults;
  for (const Kind& kind : kinds()) faults.push_back(std::string(kind.name) + ",family=lf");
  const KvRun run = run_kv(arguments_for("40", faults));
  EXPECT_EQ(kRejected, run.status) << run.output;
  EXPECT_EQ(2 * kinds().size(), run.family("lf")["rejected"].size()) << run.output;
  expect_plan(run, "kv");
}

// When all requests are invalid and there is no other family, the device gets no work request.
TEST(RequestRejection, OnlyInvalidRequests_PostNothing) {
  std::vector<std::string> arguments = arguments_for("14", all_kinds());
  arguments.insert(arguments.end(), {"--lf", "none"});
  const KvRun run = run_kv(arguments);
  EXPECT_EQ(kRejected, run.status) << run.output;
  const Json& kv = run.family("kv");
  EXPECT_EQ(14U, kv["rejected"].size()) << run.output;
  EXPECT_EQ(0, kv["served"]);
  EXPECT_EQ(0, kv["sent_messages"]);
  EXPECT_EQ(0, kv["received_messages"]);
  EXPECT_TRUE(kv["groups"].empty());
  EXPECT_EQ(0, kv["notifications"]);
  ASSERT_EQ(2U, run.devices.size());
  for (const Json& device : run.devices) {
    EXPECT_EQ(0, device["work_requests"]["rdma_write"]) << device["work_requests"];
    EXPECT_EQ(0, device["work_requests"]["rdma_write_with_imm"]) << device["work_requests"];
  }
}

TEST(RequestRejection, OtherGeometry_EndsRunBeforeStart) {
  const KvRun run = run_kv(arguments_for("4", {"geometry"}));
  EXPECT_EQ(kFailed, run.status) << run.output;
  EXPECT_NE(std::string::npos, run.output.find("geometry-mismatch: family kv: geometry ")) << run.output;
}

// Two ranks that were started separately, the second with other options.
TEST(RankAgreement, DifferentOptions_DifferenceIsNamed) {
  const auto disagree = [](const std::vector<std::string>& of_second, const std::string& reason) {
    const std::string root = "127.0.0.1:" + std::to_string(perf::free_port());
    const auto arguments = [&root](const char* rank, const std::vector<std::string>& more) {
      std::vector<std::string> all{"--root",    root, "--nranks", "2",
                                   "--rank",    rank, "--plugin", setting("KV_PLUGIN"),
                                   "--timeout", "60", "--tokens", "100"};
      all.insert(all.end(), more.begin(), more.end());
      return all;
    };
    perf::PerfProcess first(arguments("0", {}));
    perf::PerfProcess second(arguments("1", of_second));
    second.finish();
    const perf::Outcome outcome = first.finish();
    EXPECT_EQ(kUsage, outcome.status) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find("rank 1 disagrees with rank 0 about the " + reason))
        << outcome.output;
  };
  disagree({"--seed", "2"}, "requests (--tokens, --sigma, --max-tokens, --hit, --seed, --request-file), request 0: ");
  disagree({"--requests", "5"}, "number of requests (--requests, --request-file): 5 instead of 64");
  disagree({"--lf", "none"}, "families (--preset, --lf, --lf-first): kv instead of kv lf");
  disagree({"--inject", "kill"}, "injected faults (--inject): ");
}

// Ranks that mpirun has started on one host have no address of rank 0, but the decode ranks need one of each prefill
// rank.
TEST(LaunchedRanks, OpenMpi_FormOneJob) {
  const auto rank = [](const std::string& number) {
    return std::make_unique<perf::PerfProcess>(
        std::vector<std::string>{"--plugin", setting("KV_PLUGIN"), "--timeout", "60", "--tokens", "100", "--requests",
                                 "4", "--prefill", "2", "--decode", "2"},
        perf::PerfProcess::Environment{"OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK=" + number,
                                       "OMPI_COMM_WORLD_LOCAL_SIZE=4"});
  };
  std::vector<std::unique_ptr<perf::PerfProcess>> ranks;
  for (const char* number : {"0", "1", "2", "3"}) ranks.push_back(rank(number));
  for (const auto& running : ranks) {
    const perf::Outcome outcome = running->finish();
    EXPECT_EQ(perf::kCorrect, outcome.status) << outcome.output;
  }
}

TEST(CommandLine, InvalidOptions_AreRejectedWithReason) {
  const std::map<std::string, std::vector<std::string>> invalid{
      {"unknown fault 'lightning'", {"--inject", "lightning"}},
      {"there is no request 99", {"--requests", "4", "--inject", "kill,request=99"}},
      {"no family lf", {"--lf", "none", "--inject", "kill,family=lf"}},
      {"too few requests", {"--requests", "1", "--inject", "unregistered"}},
      {"cut the 1 KV head", {"--preset", "llama-70b-tp8", "--tp-ratio", "2", "--decode", "2"}},
      {"multiple of --tp-ratio", {"--tp-ratio", "2", "--decode", "3"}},
      {"cannot read", {"--request-file", "/does/not/exist"}},
      {"--prefill plus --decode", {"--procs", "5"}},
      {"gpt", {"--preset", "gpt"}},
      {"the plugin's maximum is", {"--group", "32"}},
  };
  for (const auto& [text, arguments] : invalid) {
    const KvRun run = run_kv(arguments);
    EXPECT_EQ(kUsage, run.status) << run.output;
    EXPECT_NE(std::string::npos, run.output.find(text)) << text << " in: " << run.output;
  }
  const KvRun blocks = run_kv({"--blocks", "2", "--tokens", "1000", "--sigma", "0"});
  EXPECT_EQ(kUsage, blocks.status) << blocks.output;
}

}  // namespace
}  // namespace verbatim::kv
