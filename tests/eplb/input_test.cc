// Invalid input ends verbatim-eplb before any communication, with one line that names the location. A watchdog ends a
// run that hangs.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "eplb_run.h"

namespace verbatim::eplb {
namespace {

class TraceFile : public testing::Test {
 protected:
  ~TraceFile() override { ::unlink(file_.c_str()); }

  Outcome run_trace(const std::string& text, std::vector<std::string> arguments = {}) {
    std::ofstream(file_) << text;
    arguments.insert(arguments.end(), {"--policy", "trace=" + file_, "--ranks", "2"});
    return run_over_plugin(arguments);
  }
  void expect_refused(const std::string& text, const std::string& reason,
                      const std::vector<std::string>& arguments = {}) {
    const Outcome outcome = run_trace(text, arguments);
    EXPECT_EQ(kUsage, outcome.status) << outcome.output;
    EXPECT_TRUE(contains(outcome, reason)) << outcome.output;
    EXPECT_EQ(1, std::count(outcome.output.begin(), outcome.output.end(), '\n')) << outcome.output;
  }

  const std::string file_ = testing::TempDir() + "eplb-trace-" + std::to_string(::getpid()) + ".jsonl";
};

TEST_F(TraceFile, ValidTrace_IsExecuted) {
  const std::string lines =
      "{\"layer\": 3, \"old\": [0, 1, 2, 3], \"new\": [2, 1, 2, 0]}\n\n"
      "{\"layer\": 5, \"old\": [0, 1, -1, 3], \"new\": [3, 3, 1, -1]}\n";
  for (const char* mode : {"packed", "per-tensor", "direct"}) {
    const Outcome outcome = run_trace(lines, {"--mode", mode});
    EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
    EXPECT_TRUE(contains(outcome, "\n       5 ")) << outcome.output;
  }
}

TEST_F(TraceFile, InvalidTrace_IsRejectedWithLocation) {
  expect_refused("{\"layer\": 4, \"old\": [0, 1, 2, 2], \"new\": [0, 3, 1, 2]}",
                 "layer 4, new, row 1: expert 3 is in no old row of any rank");
  expect_refused("{\"old\": [0, 1, 2, 2], \"new\": [0, 1, 2]}", "layer 0, new: 3 rows instead of 4");
  expect_refused("{\"old\": [0, 1, 2], \"new\": [0, 1, 2]}", "3 rows are not divisible by 2 ranks");
  expect_refused("{\"old\": [0, -2, 2, 3], \"new\": [0, 1, 2, 3]}", "layer 0, old, row 1: expert -2");
  expect_refused("{\"old\": [0, 7, 2, 3], \"new\": [0, 1, 2, 3]}", "layer 0, old, row 1: expert 7 is not one of 0 to 3",
                 {"--logical", "4"});
  expect_refused("{\"old\": [0, 1.5], \"new\": [0, 1]}", "line 1, old, row 1: not an expert number: 1.5");
  expect_refused("{\"old\": [0, 1], \"new\": [0, 1]}\n{\"old\": [0, 1]", "line 2: not a JSON object");
  expect_refused("{\"old\": [0, 1]}", "line 1: there is no list 'new'");
  expect_refused("{\"old\": [0, 1], \"new\": [1, 0], \"bytes\": [5144, 5143]}",
                 "line 1, row 1: 5143 bytes instead of 5144");
  expect_refused("{\"old\": [0, 1], \"new\": [1, 0], \"bytes\": [5144]}", "line 1: 'bytes' is not a list of 2 sizes");
  expect_refused("{\"old\": [0, 2147483647], \"new\": [0, 1]}", "line 1, old, row 1: not an expert number: 2147483647");
  expect_refused("", "no layers");
}

TEST(Input, InvalidOption_IsRejectedWithReason) {
  const auto expect_refused = [](const std::vector<std::string>& arguments, const std::string& reason) {
    const Outcome outcome = run_over_plugin(arguments);
    EXPECT_EQ(kUsage, outcome.status) << outcome.output;
    EXPECT_TRUE(contains(outcome, reason)) << outcome.output;
    EXPECT_EQ(1, std::count(outcome.output.begin(), outcome.output.end(), '\n')) << outcome.output;
  };
  expect_refused({"--policy", "trace=/does/not/exist"}, "/does/not/exist: cannot be read");
  expect_refused({"--policy", "none"}, "unknown policy: 'none'");
  expect_refused({"--preset", "none"}, "unknown preset: 'none'");
  expect_refused({"--ranks", "3", "--redundant", "1"}, "25 rows are not divisible by 3 ranks");
  expect_refused({"--ranks", "4", "--redundant", "0", "--policy", "scale-up"}, "no rank is left to add or remove");
  expect_refused({"--ranks", "4", "--tensors", "w:fp8:801:total"}, "tensor w: 801 bytes are not divisible by 8 rows");
  expect_refused({"--ranks", "4", "--tensors", "w:fp32:6"}, "not a multiple of the size of fp32");
  expect_refused({"--mode", "per-tensor", "--ops-per-group", "5"},
                 "a group of 5 operations cannot hold the 6 operations of one expert");
  expect_refused({"--ops-per-group", "-1"}, "--ops-per-group");
  expect_refused({"--api", "5"}, "--api must be 0 (the newest) or 6 to");
  expect_refused({"--json", "/does/not/exist/report"}, "/does/not/exist/report: cannot be written");
  expect_refused({"--compare", "a.so", "--root", "127.0.0.1:5", "--rank", "0", "--nranks", "2"},
                 "cannot be used with --root");
}

TEST(MissingLibrary, PluginOrCuda_IsNamed) {
  const Outcome plugin = run({"--plugin", "/does/not/exist.so", "--ranks", "2"});
  EXPECT_EQ(kFailed, plugin.status) << plugin.output;
  EXPECT_TRUE(contains(plugin, "/does/not/exist.so")) << plugin.output;
  const Outcome cuda = run({"--over", "nccl", "--cuda", "/no/libcuda.so", "--ranks", "2"});
  EXPECT_EQ(kFailed, cuda.status) << cuda.output;
  EXPECT_TRUE(contains(cuda, "cannot open the library: /no/libcuda.so")) << cuda.output;
}

// Runs two ranks with different options.
Outcome run_two(const std::vector<std::string>& of_first, const std::vector<std::string>& of_second) {
  const std::vector<std::string> both{"--root",    "127.0.0.1:" + std::to_string(perf::free_port()),
                                      "--nranks",  "2",
                                      "--plugin",  setting("EPLB_PLUGIN"),
                                      "--timeout", "60"};
  const auto arguments = [&both](const char* rank, const std::vector<std::string>& more) {
    std::vector<std::string> all = both;
    all.insert(all.end(), more.begin(), more.end());
    all.insert(all.end(), {"--rank", rank});
    return all;
  };
  perf::PerfProcess first(arguments("0", of_first), {}, "EPLB_TOOL");
  perf::PerfProcess second(arguments("1", of_second), {}, "EPLB_TOOL");
  second.finish();
  return first.finish();
}

TEST(RankAgreement, EqualOptions_RunSucceeds) {
  const Outcome outcome = run_two({}, {});
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
}

TEST(RankAgreement, DifferentOptions_DifferenceIsNamed) {
  const auto disagree = [](const std::vector<std::string>& of_first, const std::vector<std::string>& of_second,
                           const std::string& reason) {
    const Outcome outcome = run_two(of_first, of_second);
    EXPECT_EQ(kUsage, outcome.status) << outcome.output;
    EXPECT_TRUE(contains(outcome, "rank 1 disagrees with rank 0 about the " + reason)) << outcome.output;
  };
  disagree({}, {"--mode", "direct"}, "mode (--mode): direct instead of packed");
  disagree({}, {"--ops-per-group", "7"}, "operations per group (--ops-per-group): 7 instead of 128");
  disagree({}, {"--inject", "flip-byte"}, "injection (--inject): flip-byte instead of none");
  disagree({}, {"--scale", "2"},
           "tensor w13 (--preset, --tensors, --scale): fp8 of 2048 bytes instead of fp8 of 4097 bytes");
  disagree({}, {"--redundant", "10"}, "number of rows (--preset, --redundant): 34 instead of 32");
  disagree({}, {"--seed", "2"}, "seed (--seed): 2 instead of 1");
  disagree({"--policy", "shuffle"}, {"--policy", "rotate"}, "layer 0, new rows (--policy), row ");
}

TEST(Watchdog, StoppedRank_PendingOperationsAreListed) {
  perf::PerfProcess running({"--ranks", "2", "--iters", "1000000", "--watchdog", "2", "--timeout", "60", "--plugin",
                             setting("EPLB_PLUGIN"), "--plugin-log", "--policy", "rotate", "--delay", "20"},
                            {}, "EPLB_TOOL");
  const std::string line = running.wait_for_line("# rank    1  pid ");
  ASSERT_FALSE(line.empty());
  usleep(500'000);  // the ranks exchange data now
  const pid_t stopped = std::atoi(line.c_str() + line.find("pid") + 3);
  ASSERT_GT(stopped, 0);
  ASSERT_EQ(0, ::kill(stopped, SIGSTOP));
  const Outcome outcome = running.finish();
  ::kill(stopped, SIGKILL);
  EXPECT_EQ(kTimeout, outcome.status) << outcome.output;
}

}  // namespace
}  // namespace verbatim::eplb
