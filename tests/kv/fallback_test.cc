// Fallbacks after a failed transfer: first a fresh connection, then a staged copy, then a list of blocks to recompute.
// Each stage takes bounded time, a failed transfer sends no notification, and the other family is not affected.
#include "kv_run.h"

namespace verbatim::kv {
namespace {

constexpr int kRequests = 24;
// A failure that is found by its event has no need of a timeout; a lost message is found by its timeout alone.
constexpr const char* kLongMs = "20000";
constexpr const char* kShortMs = "3000";
constexpr double kBoundMs = 20'000;  // of all fallbacks of a request: three short timeouts, or none

struct Timeouts {
  const char* request_ms = kLongMs;
  const char* stage_ms = kLongMs;
};

KvRun run_with(const std::vector<std::string>& faults, const Timeouts& timeouts = {},
               const std::vector<std::string>& environment = {}) {
  std::vector<std::string> arguments{"--requests",
                                     std::to_string(kRequests),
                                     "--tokens",
                                     "500",
                                     "--sigma",
                                     "0",
                                     "--scale",
                                     "40",
                                     "--request-timeout-ms",
                                     timeouts.request_ms,
                                     "--stage-timeout-ms",
                                     timeouts.stage_ms};
  for (const std::string& fault : faults) arguments.insert(arguments.end(), {"--inject", fault});
  return run_kv(arguments, environment);
}

void expect_all_served(const KvRun& run, const std::string& name) {
  const Json& family = run.family(name);
  ASSERT_TRUE(family.contains("served")) << run.output;
  EXPECT_EQ(kRequests, family["served"]) << run.output;
  EXPECT_EQ(family["plan"]["bytes"], family["served_bytes"]) << run.output;
  EXPECT_EQ(0, family["wrong_bytes"]) << run.output;
  EXPECT_TRUE(family["recompute"].empty()) << run.output;
  EXPECT_LT(family["longest_fallback_ms"], kBoundMs) << run.output;
}

// Exactly this request must be recomputed: 500 tokens, 8 blocks.
void expect_one_recomputed(const KvRun& run, const std::string& name, std::uint32_t request) {
  const Json& family = run.family(name);
  ASSERT_TRUE(family.contains("recompute")) << run.output;
  EXPECT_EQ(kRequests - 1, family["served"]) << run.output;
  ASSERT_EQ(1U, family["recompute"].size()) << run.output;
  EXPECT_EQ(request, family["recompute"][0]["request"]);
  EXPECT_EQ(0, family["recompute"][0]["first"]);
  EXPECT_EQ(8U, family["recompute"][0]["blocks"].size());
  EXPECT_EQ(0, family["wrong_bytes"]) << run.output;
  EXPECT_LT(family["longest_fallback_ms"], kBoundMs) << run.output;
}

TEST(Fallback, ConnectionKilledOnce_IsReplaced) {
  const KvRun run = run_with({"kill,family=lf,request=10"});
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_all_served(run, "lf");
  EXPECT_LE(1, run.family("lf")["fresh_connections"]);
  EXPECT_EQ(0, run.family("lf")["staged_copies"]);
  EXPECT_EQ(2 * 2, run.family("lf")["connections"]);
  expect_plan(run, "kv");
  EXPECT_EQ(2, run.family("kv")["connections"]);
}

TEST(Fallback, ConnectionKilledTwice_UsesStagedCopy) {
  const KvRun run = run_with({"kill,family=lf,request=10,times=2"});
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_all_served(run, "lf");
  EXPECT_LE(1, run.family("lf")["staged_copies"]);
  EXPECT_EQ(0, run.family("lf")["recomputes"]);
  expect_plan(run, "kv");
}

TEST(Fallback, StagedCopyFails_RequestIsRecomputed) {
  const KvRun run = run_with({"kill,family=lf,request=10,times=3"}, {.stage_ms = kShortMs});
  EXPECT_EQ(kRecompute, run.status) << run.output;
  expect_one_recomputed(run, "lf", 10);
  expect_plan(run, "kv");
}

TEST(Fallback, NotificationLostOnce_IsResent) {
  const KvRun run = run_with({"lost-notification,request=10"}, {.request_ms = kShortMs});
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_all_served(run, "kv");
  EXPECT_LE(1, run.family("kv")["fresh_connections"]);
  EXPECT_EQ(kRequests, run.family("kv")["notifications"]);
  expect_all_served(run, "lf");
}

TEST(Fallback, NotificationAlwaysLost_RequestIsRecomputed) {
  const KvRun run = run_with({"lost-notification,request=10,times=9"}, {.request_ms = kShortMs, .stage_ms = kShortMs});
  EXPECT_EQ(kRecompute, run.status) << run.output;
  expect_one_recomputed(run, "kv", 10);
  EXPECT_EQ(kRequests - 1, run.family("kv")["notifications"]);
  expect_all_served(run, "lf");
}

TEST(Fallback, DelayedTransfer_UsesNoFallback) {
  const KvRun run = run_with({"delay,request=10,delay-ms=400", "delay,family=lf,request=11,delay-ms=400"});
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_plan(run, "kv");
  expect_plan(run, "lf");
}

// A fault of the device instead of the tool: it completes a WRITE with an error, and both queue pairs fail.
TEST(Fallback, DeviceError_AllRequestsAreServed) {
  const KvRun run = run_with({}, {}, {"SOFTVERBS_FAULTS=complete op=write_imm qp=any nth=20 status=REM_ACCESS_ERR"});
  EXPECT_EQ(kOk, run.status) << run.output;
  expect_all_served(run, "kv");
  expect_all_served(run, "lf");
  const auto fresh = [&](const char* name) { return run.family(name)["fresh_connections"].get<int>(); };
  EXPECT_LE(1, fresh("kv") + fresh("lf")) << run.output;
  EXPECT_TRUE(fresh("kv") == 0 || fresh("lf") == 0) << "one queue pair failed, but both families replaced connections\n"
                                                    << run.output;
}

}  // namespace
}  // namespace verbatim::kv
