// verbatim-perf cost: it counts calls, memory and instructions per message, gives the same result in each run, and
// Verbatim stays within its limits.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "perf_run.h"

namespace verbatim::perf {
namespace {

using Json = nlohmann::json;

constexpr double kReceiveBatch = 16;               // number of receives that Verbatim posts in one call
constexpr double kBytesPerConnection = 52 * 1024;  // before connections had lanes: 48,900

class Cost : public testing::Test {
 protected:
  ~Cost() override { ::unlink(file_.c_str()); }

  // The subjects that the JSON file lists; none when the run failed.
  Json measure(const std::vector<std::string>& arguments, const PerfProcess::Environment& environment = {}) {
    return measure("messages", "subjects", arguments, environment);
  }

  // The same of puts.
  Json measure_puts(const std::vector<std::string>& arguments, const PerfProcess::Environment& environment = {}) {
    return measure("puts", "puts", arguments, environment);
  }

  static bool has_valgrind() { return std::system("valgrind --version >/dev/null 2>&1") == 0; }

 private:
  Json measure(const char* what, const char* key, std::vector<std::string> arguments,
               const PerfProcess::Environment& environment) {
    arguments.insert(arguments.begin(), "cost");
    arguments.insert(arguments.end(), {"--what", what, "--json", file_});
    const Outcome outcome = run(arguments, environment);
    EXPECT_EQ(0, outcome.status) << outcome.output;
    if (outcome.status != 0) return Json::array();
    std::ifstream in(file_);
    return Json::parse(in)[key];
  }

  const std::string file_ = testing::TempDir() + "cost-" + std::to_string(::getpid()) + ".json";
};

TEST_F(Cost, OneMessage_VerbCallsAreCounted) {
  const Json subjects = measure({"--plugin", setting("PERF_PLUGIN"), "--no-instructions", "--sizes", "0,4K", "--groups",
                                 "1,8", "--qps", "1", "--messages", "64", "--connections", "0"});
  ASSERT_EQ(1U, subjects.size());
  ASSERT_EQ(4U, subjects[0]["cells"].size());
  for (const Json& cell : subjects[0]["cells"]) {
    const double group = cell["group"];
    // Each group has one CTS and one chain of WRITEs; the chain has one completion at each end.
    EXPECT_DOUBLE_EQ(2 / group, cell["post_send"]) << cell;
    EXPECT_DOUBLE_EQ(1 / group, cell["recv_requests"]) << cell;
    EXPECT_DOUBLE_EQ(1 / group / kReceiveBatch, cell["post_recv"]) << cell;
    EXPECT_LE(2 / group, cell["completions"]) << cell;
    EXPECT_GE((2 + 1 / kReceiveBatch) / group, cell["completions"]) << cell;
    EXPECT_EQ(cell["post_send"].get<double>() + cell["post_recv"].get<double>(), cell["doorbells"]) << cell;
  }
  EXPECT_DOUBLE_EQ(2, subjects[0]["cells"][0]["send_requests"]);
}

// Limits for one small message in steady state, both ends together, for each mode of completion.
TEST_F(Cost, SmallMessage_StaysWithinLimitsOfItsMode) {
  struct Mode {
    const char* completion;
    bool optional;
    double send_requests;
    double post_recv;
    double recv_requests;
    double completions;
  };
  constexpr double kAcknowledged = 8;  // one of this many receives with optional completion is signaled
  for (const Mode& mode : {Mode{"imm", false, 2, 1 / kReceiveBatch, 1, 2 + 1 / kReceiveBatch},
                           Mode{"atomic", false, 3, 0, 0, 1 + 1 / kReceiveBatch},
                           Mode{"imm", true, 2 + 1 / kAcknowledged, 0, 0, 1 + 1 / kAcknowledged},
                           Mode{"atomic", true, 2 + 1 / kAcknowledged, 0, 0, 1 + 1 / kAcknowledged}}) {
    SCOPED_TRACE(std::string(mode.completion) + (mode.optional ? ", optional" : ""));
    std::vector<std::string> arguments{"--plugin",
                                       setting("PERF_PLUGIN"),
                                       "--no-instructions",
                                       "--sizes",
                                       "0,8,4K",
                                       "--groups",
                                       "1,8",
                                       "--qps",
                                       "1,4",
                                       "--messages",
                                       "256",
                                       "--connections",
                                       "0"};
    if (mode.optional) arguments.emplace_back("--optional");
    const Json subjects = measure(arguments, {std::string("VERBATIM_COMPLETION=") + mode.completion});
    ASSERT_EQ(2U, subjects.size());
    for (const Json& subject : subjects) {
      EXPECT_EQ(mode.optional, subject["optional"]);
      ASSERT_EQ(6U, subject["cells"].size());
      for (const Json& cell : subject["cells"]) {
        if (cell["group"] == 1) {
          EXPECT_DOUBLE_EQ(2, cell["post_send"]) << cell;
          EXPECT_GE(mode.send_requests, cell["send_requests"]) << cell;
          EXPECT_GE(mode.post_recv, cell["post_recv"]) << cell;
          EXPECT_GE(mode.recv_requests, cell["recv_requests"]) << cell;
          EXPECT_GE(mode.completions, cell["completions"]) << cell;
          EXPECT_LE(1, cell["completions"]) << cell;
        } else if (std::string(mode.completion) == "atomic") {
          EXPECT_EQ(0, cell["post_recv"]) << cell;
          EXPECT_EQ(0, cell["recv_requests"]) << cell;
        }
      }
    }
  }
}

TEST_F(Cost, OneConnection_MemoryIsCounted) {
  const Json subjects = measure({"--plugin", setting("PERF_PLUGIN"), "--no-instructions", "--sizes", "8", "--groups",
                                 "1", "--qps", "1", "--messages", "1", "--connections", "300"});
  ASSERT_EQ(1U, subjects.size());
  const Json& subject = subjects[0];
  // At least both rings of the connection, with 263 entries of 32 bytes each.
  EXPECT_LT(2 * 263 * 32, subject["bytes_per_connection"]);
  EXPECT_GT(kBytesPerConnection, subject["bytes_per_connection"]);
  EXPECT_DOUBLE_EQ(2, subject["objects_per_connection"]["qp"]);
  EXPECT_DOUBLE_EQ(2, subject["objects_per_connection"]["cq"]);
  EXPECT_LT(0, subject["connections_per_s"]);
}

// Its QP, its CQs and what the data path keeps of it, at both ends. From three ports on, CTS entries have 64 bytes in
// place of 32, in the ring and in its copy.
TEST_F(Cost, FurtherPort_MemoryIsCounted) {
  constexpr double kBytesPerPort = 12 * 1024;
  double one_port = 0;
  for (const int ports : {1, 2, 3, 4}) {
    const Json subjects =
        measure({"--plugin", setting("PERF_PLUGIN"), "--merge", std::to_string(ports), "--sizes", "8", "--groups", "1",
                 "--qps", "1", "--messages", "8", "--connections", "200", "--no-instructions"},
                {"SOFTVERBS_DEVICES=4"});
    ASSERT_EQ(1U, subjects.size());
    const double bytes = subjects[0]["bytes_per_connection"];
    if (ports == 1) {
      one_port = bytes;
    } else {
      EXPECT_LE(bytes, one_port + (ports - 1) * kBytesPerPort) << ports;
    }
    EXPECT_DOUBLE_EQ(2 * ports, subjects[0]["objects_per_connection"]["qp"]);
  }
}

TEST_F(Cost, RepeatedRun_CountsSameInstructions) {
  if (!has_valgrind()) GTEST_SKIP() << "valgrind is not installed";
  const auto measure_plugins = [&](const std::string& qps) {
    return measure({"--plugin", setting("PERF_PLUGIN"), "--plugin", setting("MUTATE"), "--sizes", "8", "--groups", "1",
                    "--qps", qps, "--messages", "32", "--connections", "0"});
  };
  const Json subjects = measure_plugins("1,2");
  ASSERT_EQ(4U, subjects.size());
  for (const Json& subject : subjects) {
    for (const Json& cell : subject["cells"]) {
      double sum = 0;
      for (const Json& call : cell["instructions_by_call"]) sum += call["plugin"].get<double>();
      EXPECT_LT(10, cell["instructions"]["plugin"]) << cell;
      EXPECT_LT(10, sum) << cell;
      EXPECT_LT(100, cell["instructions"]["verbs"]) << cell;
    }
    EXPECT_LT(5, subject["instructions_test_incomplete"]["plugin"]);
    EXPECT_LT(5, subject["instructions_send_without_receive"]["plugin"]);
  }
  EXPECT_LT(100, subjects[0]["instructions_connect"]["plugin"]);  // the wrapper uses Verbatim's connect unchanged
  // The wrapper's own instructions are measured too.
  const auto plugin_share = [](const Json& subject) {
    return subject["cells"][0]["instructions"]["plugin"].get<double>();
  };
  EXPECT_NE(plugin_share(subjects[0]), plugin_share(subjects[2]));
  const Json again = measure_plugins("2");  // of these, the cells with two QPs, which subjects has after those with one
  ASSERT_EQ(2U, again.size());
  // Within one instruction, for both plugins.
  EXPECT_NEAR(plugin_share(subjects[1]), plugin_share(again[0]), 1);
  EXPECT_NEAR(plugin_share(subjects[3]), plugin_share(again[1]), 1);
}

// On a device with link layer InfiniBand adaptive routing is on: a long message ends with a write of its own.
struct LinkLayer {
  const char* name;
  double single;  // instructions of the plugin for a message alone,
  double member;  // and for a member of a group of eight
};
// Before connections had lanes: 407 and 206, with adaptive routing 436 and 209.
constexpr LinkLayer kLinkLayers[] = {{"roce", 410, 210}, {"ib", 440, 215}};

TEST_F(Cost, OneMessage_StaysWithinInstructionLimit) {
  if (!has_valgrind()) GTEST_SKIP() << "valgrind is not installed";
  const std::vector<std::string> arguments{
      "--plugin", setting("PERF_PLUGIN"), "--sizes", "128K", "--groups", "1,8", "--qps", "1", "--connections", "0"};
  Json cells;  // of the first link layer
  for (const LinkLayer& layer : kLinkLayers) {
    SCOPED_TRACE(layer.name);
    const Json subjects = measure(arguments, {std::string("SOFTVERBS_LINK_LAYER=") + layer.name});
    ASSERT_EQ(1U, subjects.size());
    const Json& subject = subjects[0];
    ASSERT_EQ(2U, subject["cells"].size());
    const Json& single = subject["cells"][0];
    EXPECT_GE(layer.single, single["instructions"]["plugin"]) << single;
    EXPECT_DOUBLE_EQ(2, single["post_send"]) << single;
    EXPECT_GE(1 / kReceiveBatch, single["post_recv"]) << single;
    EXPECT_GE(2 + 1 / kReceiveBatch, single["completions"]) << single;
    EXPECT_GE(layer.member, subject["cells"][1]["instructions"]["plugin"]) << subject["cells"][1];
    EXPECT_GE(36, subject["instructions_test_incomplete"]["plugin"]);
    EXPECT_GE(25, subject["instructions_send_without_receive"]["plugin"]);
    for (const Json& cell : subject["cells"]) EXPECT_GE(20, cell["instructions"]["libc"]) << cell;
    if (cells.empty()) cells = subject["cells"];
  }
  constexpr double kLatency = 60;  // VERBATIM_LATENCY, both ends together
  const Json timed = measure(
      arguments, {std::string("SOFTVERBS_LINK_LAYER=") + kLinkLayers[0].name, "VERBATIM_LATENCY=1"})[0]["cells"];
  for (std::size_t i = 0; i < timed.size(); ++i) {
    const double more =
        timed[i]["instructions"]["plugin"].get<double>() - cells[i]["instructions"]["plugin"].get<double>();
    EXPECT_LT(20, more) << timed[i];
    EXPECT_GE(kLatency, more) << timed[i];
  }
}

// With link layer InfiniBand its size is in units of its buffer.
TEST_F(Cost, MessageShorterThanItsBuffer_StaysWithinInstructionLimit) {
  if (!has_valgrind()) GTEST_SKIP() << "valgrind is not installed";
  for (const LinkLayer& layer : {LinkLayer{"roce", 410, 0}, LinkLayer{"ib", 580, 0}}) {
    SCOPED_TRACE(layer.name);
    const Json subjects = measure({"--plugin", setting("PERF_PLUGIN"), "--sizes", "130000", "--room", "128K",
                                   "--groups", "1", "--qps", "1", "--connections", "0"},
                                  {std::string("SOFTVERBS_LINK_LAYER=") + layer.name});
    ASSERT_EQ(1U, subjects.size());
    EXPECT_DOUBLE_EQ(128 << 10, subjects[0]["room"]);
    EXPECT_GE(layer.single, subjects[0]["cells"][0]["instructions"]["plugin"]) << subjects[0]["cells"][0];
  }
}

TEST_F(Cost, StripedMessageWithAdaptiveRouting_StaysWithinInstructionLimit) {
  if (!has_valgrind()) GTEST_SKIP() << "valgrind is not installed";
  constexpr double kLimits[] = {1150, 1650};  // before lanes: 1008 and 1437
  const Json subjects = measure(
      {"--plugin", setting("PERF_PLUGIN"), "--sizes", "1M", "--groups", "1", "--qps", "2,4", "--connections", "0"},
      {"SOFTVERBS_LINK_LAYER=ib"});
  ASSERT_EQ(std::size(kLimits), subjects.size());
  for (std::size_t i = 0; i < std::size(kLimits); ++i) {
    const Json& cell = subjects[i]["cells"][0];
    EXPECT_GE(kLimits[i], cell["instructions"]["plugin"]) << cell;
  }
}

// A put has one work request, its signal another one; the last one is signalled. Puts of a burst to one peer share a
// doorbell.
TEST_F(Cost, OnePut_VerbCallsAreCounted) {
  const Json puts = measure_puts({"--plugin", setting("PERF_PLUGIN"), "--no-instructions", "--sizes", "8,4K"});
  ASSERT_EQ(1U, puts.size());
  ASSERT_EQ(2U, puts[0]["cells"].size());
  for (const Json& cell : puts[0]["cells"]) {
    EXPECT_DOUBLE_EQ(1, cell["put"]["post_send"]) << cell;
    EXPECT_DOUBLE_EQ(1, cell["put"]["send_requests"]) << cell;
    EXPECT_DOUBLE_EQ(1, cell["put"]["completions"]) << cell;
    EXPECT_DOUBLE_EQ(1, cell["put_signal"]["post_send"]) << cell;
    EXPECT_DOUBLE_EQ(2, cell["put_signal"]["send_requests"]) << cell;
    EXPECT_DOUBLE_EQ(1, cell["put_signal"]["completions"]) << cell;
    EXPECT_DOUBLE_EQ(1.0 / 8, cell["put_burst"]["post_send"]) << cell;
    EXPECT_DOUBLE_EQ(1.0 / 8, cell["put_burst"]["doorbells"]) << cell;
  }
}

TEST_F(Cost, OnePut_StaysWithinInstructionLimit) {
  if (!has_valgrind()) GTEST_SKIP() << "valgrind is not installed";
  const Json puts = measure_puts({"--plugin", setting("PERF_PLUGIN"), "--sizes", "8,4K"});
  ASSERT_EQ(1U, puts.size());
  for (const Json& cell : puts[0]["cells"]) {
    for (const auto& [kind, limit] :
         {std::pair("put", 160), std::pair("put_signal", 230), std::pair("put_burst", 140)}) {
      const Json& counted = cell[kind]["instructions"];
      EXPECT_GE(limit, counted["plugin"]) << kind << " " << counted;
      EXPECT_LT(50, counted["plugin"]) << kind << " " << counted;
      EXPECT_EQ(0, counted["libc"]) << kind << " " << counted;
    }
  }
  EXPECT_GE(40, puts[0]["instructions_test_incomplete"]["plugin"]);
  EXPECT_LT(5, puts[0]["instructions_test_incomplete"]["plugin"]);
}

// What a rank remembers for the loss of a port is dearer than the put.
TEST_F(Cost, OnePutOverMergedDevices_StaysWithinInstructionLimit) {
  if (!has_valgrind()) GTEST_SKIP() << "valgrind is not installed";
  const Json puts = measure_puts({"--plugin", setting("PERF_PLUGIN"), "--merge", "2", "--sizes", "8,4K"},
                                 {"SOFTVERBS_DEVICES=2", "SOFTVERBS_ATOMICS=glob"});
  ASSERT_EQ(1U, puts.size());
  for (const Json& cell : puts[0]["cells"]) {
    EXPECT_DOUBLE_EQ(1.0 / 8, cell["put_burst"]["post_send"]) << cell;
    for (const auto& [kind, limit] :
         {std::pair("put", 560), std::pair("put_signal", 740), std::pair("put_burst", 530)}) {
      EXPECT_GE(limit, cell[kind]["instructions"]["plugin"]) << kind << ' ' << cell;
    }
  }
  EXPECT_GE(160, puts[0]["instructions_test_incomplete"]["plugin"]);
}

TEST_F(Cost, PutsOfAPluginWithoutRmaTable_AreRejected) {
  const Outcome outcome = run({"cost", "--plugin", setting("MUTATE"), "--what", "puts", "--no-instructions"});
  EXPECT_NE(0, outcome.status);
  EXPECT_NE(std::string::npos, outcome.output.find("does not export an RMA table")) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("Next: ")) << outcome.output;
  const Outcome meaningless = run({"cost", "--plugin", setting("PERF_PLUGIN"), "--what", "puts", "--qps", "2"});
  EXPECT_EQ(kUsage, meaningless.status);
  EXPECT_NE(std::string::npos, meaningless.output.find("--qps has no meaning for puts")) << meaningless.output;
}

TEST_F(Cost, MissingPlugin_IsRejected) {
  EXPECT_EQ(kUsage, run({"cost", "--sizes", "8"}).status);
  EXPECT_EQ(kUsage, run({"cost", "--plugin", setting("PERF_PLUGIN"), "--sizes", "eight"}).status);
  EXPECT_EQ(kUsage, run({"cost", "--plugin", setting("PERF_PLUGIN"), "--api", "8", "--optional"}).status);
  EXPECT_NE(0, run({"cost", "--plugin", "/does/not/exist.so", "--no-instructions"}).status);
}

}  // namespace
}  // namespace verbatim::perf
