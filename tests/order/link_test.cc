// What the order buys, on softverbs' virtual clock: posted while the clock is held, with every receive announced
// before.
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
    ADD_FAILURE() << "no " << order;
    return {};
  }

  std::string output_;

 private:
  const ranks::Scratch scratch_{"link-order-test"};
};

TEST_F(LinkOrder, EightRanksFourConnections_OneSenderPerReceiver) {
  const Json report = measure({"--ranks", "8", "--flows", "4", "--orders", "native,pool"});
  ASSERT_FALSE(report.is_null());
  EXPECT_NEAR(report["premise"]["qp_number"].get<double>(), 1, 1e-9);
  EXPECT_NE(output_.find("served by QP number"), std::string::npos) << output_;
  const Json pool = of(report, "pool");
  const Json native = of(report, "native");
  EXPECT_EQ(pool["exact"], pool["qps"]);
  EXPECT_EQ(pool["inversions"], 0);
  EXPECT_EQ(pool["senders"], 1) << "at one receiver at the same time";
  EXPECT_LE(pool["first_max"].get<double>(), 6);
  EXPECT_GE(pool["jain"].get<double>(), 0.98);
  EXPECT_NEAR(native["first_max"].get<double>(), 24, 1e-9);
  EXPECT_GT(native["inversions"].get<int>(), 0);
  for (const char* same : {"bytes", "connections", "qps"}) EXPECT_EQ(pool[same], native[same]) << same;
  EXPECT_EQ(pool["connections"], 8 * 7 * 4);
  EXPECT_EQ(pool["bytes"], 8 * 7 * 4 * 131072);
}

// Channels and QPs of a connection count alike.
TEST_F(LinkOrder, FourQpsPerConnection_OneSenderPerReceiver) {
  const Json report = measure({"--ranks", "8", "--flows", "1", "--qps", "4", "--bytes", "512K", "--orders", "pool"});
  ASSERT_FALSE(report.is_null());
  const Json pool = of(report, "pool");
  EXPECT_EQ(pool["exact"], pool["qps"]);
  EXPECT_EQ(pool["qps"], 8 * 7 * 4);
  EXPECT_EQ(pool["senders"], 1);
  EXPECT_LE(pool["first_max"].get<double>(), 6);
  EXPECT_GE(pool["jain"].get<double>(), 0.98);
}

// Who is asked for from rank 0 on by everybody meets everybody there, but for the ring.
TEST_F(LinkOrder, WithoutRotationRingOrder_OneSenderPerReceiver) {
  const Json report = measure({"--ranks", "8", "--flows", "2", "--no-rotation", "--orders", "native,ring"});
  ASSERT_FALSE(report.is_null());
  EXPECT_EQ(of(report, "native")["senders"], 7);
  EXPECT_GT(of(report, "native")["first_max"].get<double>(), 12);
  const Json ring = of(report, "ring");
  EXPECT_EQ(ring["connections"], of(report, "native")["connections"]);
  EXPECT_EQ(ring["bytes"], of(report, "native")["bytes"]);
  // On a machine so busy that a burst is cut in two the ring is one of each part.
  if (ring["exact"] == ring["qps"]) {
    EXPECT_EQ(ring["senders"], 1);
    EXPECT_LE(ring["first_max"].get<double>(), 6);
  }
}

TEST_F(LinkOrder, ArbitrationByArrival_ReportsNoEffect) {
  const Json report = measure({"--ranks", "4", "--orders", "pool"}, {"SOFTVERBS_ARBITRATION=arrival"});
  ASSERT_FALSE(report.is_null());
  EXPECT_LT(report["premise"]["qp_number"].get<double>(), 0.9);
  EXPECT_NEAR(report["premise"]["doorbell"].get<double>(), 1, 1e-9);
  EXPECT_NE(output_.find("does not serve by QP number"), std::string::npos) << output_;
}

TEST_F(LinkOrder, WithoutVirtualClock_CompletionTimesAreUsed) {
  const Json report = measure({"--ranks", "3", "--flows", "2", "--orders", "native,pool"}, {"SOFTVERBS_LINK_GBPS=0"});
  ASSERT_FALSE(report.is_null());
  EXPECT_EQ(of(report, "pool")["exact"], of(report, "pool")["qps"]);
  EXPECT_TRUE(of(report, "pool")["senders"].is_null());
  EXPECT_GT(of(report, "pool")["first_max"].get<double>(), 0);
}

TEST_F(LinkOrder, OneQpPerPeer_ReportsNoEffect) {
  const Json report = measure({"--ranks", "4", "--flows", "1", "--orders", "native,pool"});
  ASSERT_FALSE(report.is_null());
  EXPECT_EQ(of(report, "native")["first_max"], of(report, "pool")["first_max"]);
  EXPECT_NE(output_.find("no order gains anything"), std::string::npos) << output_;
}

}  // namespace
}  // namespace verbatim::perf
