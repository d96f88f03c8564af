// The effect of the order, in virtual time.
//: program order_link link=qp_order,json,perf_run,gtest
//: test order-link use=ranks SOFTVERBS_DEVICES=8 SOFTVERBS_LINK_GBPS=64
//:   + SOFTVERBS_CONTROL={softverbs_control} PERF_TOOL={verbatim_perf}

// The effect of the QP order, measured with softverbs' virtual clock: all receives are posted first, then all sends
// while the clock is stopped.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "perf/perf_run.h"
#include "ranks/scratch_directory.h"

namespace verbatim::perf {
namespace {

using Json = nlohmann::json;

class LinkOrder : public testing::Test {
 protected:
  Json measure(std::vector<std::string> arguments, const PerfProcess::Environment& environment = {}) {
    const std::string file = (scratch_ / "report.json").string();
    arguments.insert(arguments.begin(), {"qp-order", "--plugin", setting("PLUGIN"), "--json", file});
    const Outcome outcome = run(arguments, environment);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    output_ = outcome.output;
    if (outcome.status != 0) return {};
    std::ifstream in(file);
    return Json::parse(in);
  }

  static Json of(const Json& report, const std::string& order) {
    for (const Json& row : report["orders"]) {
      if (row["order"] == order) return row;
    }
    ADD_FAILURE() << "the report has no order " << order;
    return {};
  }

  std::string output_;

 private:
  const ranks::Scratch scratch_{"link-order-test"};
};

TEST_F(LinkOrder, EightRanksFourConnections_OneSenderPerReceiver) {
  const Json report = measure({"--ranks", "8", "--flows", "4", "--orders", "native,staggered"});
  ASSERT_FALSE(report.is_null());
  EXPECT_NEAR(report["premise"]["qp_number"].get<double>(), 1, 1e-9);
  EXPECT_NE(output_.find("served by QP number"), std::string::npos) << output_;
  const Json staggered = of(report, "staggered");
  const Json native = of(report, "native");
  EXPECT_EQ(staggered["exact"], staggered["qps"]);
  EXPECT_EQ(staggered["inversions"], 0);
  EXPECT_EQ(staggered["senders"], 1) << "at one receiver at the same time";
  EXPECT_LE(staggered["first_max"].get<double>(), 6);
  EXPECT_GE(staggered["jain"].get<double>(), 0.98);
  EXPECT_NEAR(native["first_max"].get<double>(), 24, 1e-9);
  EXPECT_GT(native["inversions"].get<int>(), 0);
  for (const char* same : {"bytes", "connections", "qps"}) EXPECT_EQ(staggered[same], native[same]) << same;
  EXPECT_EQ(staggered["connections"], 8 * 7 * 4);
  EXPECT_EQ(staggered["bytes"], 8 * 7 * 4 * 131072);
}

// More QPs of a connection have the same effect as more connections.
TEST_F(LinkOrder, FourQpsPerConnection_OneSenderPerReceiver) {
  const Json report =
      measure({"--ranks", "8", "--flows", "1", "--qps", "4", "--bytes", "512K", "--orders", "staggered"});
  ASSERT_FALSE(report.is_null());
  const Json staggered = of(report, "staggered");
  EXPECT_EQ(staggered["exact"], staggered["qps"]);
  EXPECT_EQ(staggered["qps"], 8 * 7 * 4);
  EXPECT_EQ(staggered["senders"], 1);
  EXPECT_LE(staggered["first_max"].get<double>(), 6);
  EXPECT_GE(staggered["jain"].get<double>(), 0.98);
}

// All ranks request rank 0 first: in native order all of them send to rank 0 at the same time.
TEST_F(LinkOrder, WithoutRotation_OneSenderPerReceiver) {
  const Json report = measure({"--ranks", "8", "--flows", "2", "--no-rotation", "--orders", "native,staggered"});
  ASSERT_FALSE(report.is_null());
  EXPECT_EQ(of(report, "native")["senders"], 7);
  EXPECT_GT(of(report, "native")["first_max"].get<double>(), 12);
  const Json ring = of(report, "staggered");
  EXPECT_EQ(ring["connections"], of(report, "native")["connections"]);
  EXPECT_EQ(ring["bytes"], of(report, "native")["bytes"]);
  // On a very busy machine the burst can end early. Then later requests keep the order of the calls.
  if (ring["exact"] == ring["qps"]) {
    EXPECT_EQ(ring["senders"], 1);
    EXPECT_LE(ring["first_max"].get<double>(), 6);
  }
}

TEST_F(LinkOrder, ArbitrationByArrival_ReportsNoEffect) {
  const Json report = measure({"--ranks", "4", "--orders", "staggered"}, {"SOFTVERBS_ARBITRATION=arrival"});
  ASSERT_FALSE(report.is_null());
  EXPECT_LT(report["premise"]["qp_number"].get<double>(), 0.9);
  EXPECT_NEAR(report["premise"]["doorbell"].get<double>(), 1, 1e-9);
  EXPECT_NE(output_.find("does not serve by QP number"), std::string::npos) << output_;
}

TEST_F(LinkOrder, WithoutVirtualClock_CompletionTimesAreUsed) {
  const Json report =
      measure({"--ranks", "3", "--flows", "2", "--orders", "native,staggered"}, {"SOFTVERBS_LINK_GBPS=0"});
  ASSERT_FALSE(report.is_null());
  EXPECT_EQ(of(report, "staggered")["exact"], of(report, "staggered")["qps"]);
  EXPECT_TRUE(of(report, "staggered")["senders"].is_null());
  EXPECT_GT(of(report, "staggered")["first_max"].get<double>(), 0);
}

TEST_F(LinkOrder, OneQpPerPeer_ReportsNoEffect) {
  const Json report = measure({"--ranks", "4", "--flows", "1", "--orders", "native,staggered"});
  ASSERT_FALSE(report.is_null());
  EXPECT_EQ(of(report, "native")["first_max"], of(report, "staggered")["first_max"]);
  EXPECT_NE(output_.find("no order gains anything"), std::string::npos) << output_;
}

}  // namespace
}  // namespace verbatim::perf
