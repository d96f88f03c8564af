// verbatim-perf put, put_signal, get and alltoall_put over the plugin that PERF_PLUGIN names, if it has an RMA table.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "netapi/rma.h"
#include "perf_run.h"

namespace verbatim::perf {
namespace {

using Arguments = std::vector<std::string>;

bool has_rma() {
  return netapi::open_rma_plugin(setting("PERF_PLUGIN")).plugin != nullptr;
}

Outcome run_puts(Arguments arguments, const char* plugin = "PERF_PLUGIN",
                 const PerfProcess::Environment& environment = {}) {
  arguments.insert(arguments.end(), {"--plugin", setting(plugin), "--timeout", "60"});
  return run(arguments, environment);
}

class PutOperation : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!has_rma()) GTEST_SKIP() << "the plugin has no RMA table";
  }
};
INSTANTIATE_TEST_SUITE_P(Perf, PutOperation, testing::Values("put", "put_signal", "get", "alltoall_put"),
                         [](const auto& tested) { return std::string(tested.param); });

// With v13 and v14, sizes of zero bytes, odd sizes, and such that not every context has a part.
TEST_P(PutOperation, SeveralRanksAndContexts_AreCorrect) {
  for (const char* const version : {"13", "14"}) {
    const Outcome outcome = run_puts({GetParam(), "--api", version, "--procs", "3", "--contexts", "3", "-b", "0", "-e",
                                      "216001", "-f", "60", "-n", "20", "-c", "2", "-d", "uint8"});
    EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find("# Wrong elements    : 0 OK")) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find(std::string("RMA plugin v") + version)) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find("3 context(s)")) << outcome.output;
  }
}

TEST_P(PutOperation, OneRank_IsCorrect) {
  const Outcome alone = run_puts({GetParam(), "--procs", "1", "-b", "64K", "-e", "64K", "-n", "3"});
  EXPECT_EQ(kCorrect, alone.status) << alone.output;
}

TEST(PutReport, OneRun_HasContextsAndRows) {
  if (!has_rma()) GTEST_SKIP() << "the plugin has no RMA table";
  const std::string path = testing::TempDir() + "puts_" + std::to_string(::getpid()) + ".json";
  const Outcome outcome = run_puts(
      {"put_signal", "--contexts", "2", "-b", "1K", "-e", "4K", "-f", "2", "-n", "3", "--depth", "16", "--json", path});
  ASSERT_EQ(kCorrect, outcome.status) << outcome.output;
  const auto json = nlohmann::json::parse(std::ifstream(path));
  std::remove(path.c_str());
  EXPECT_EQ("put_signal", json["operation"]);
  EXPECT_EQ(2, json["contexts"]);
  EXPECT_EQ(16, json["depth"]);
  EXPECT_EQ(14, json["plugin"]["api_version"]);
  EXPECT_EQ("regMrSym", json["ranks"][1]["registered_by"]);
  EXPECT_FALSE(json.contains("channels"));
  ASSERT_EQ(3U, json["rows"].size());
  EXPECT_EQ(1024, json["rows"][0]["bytes"]);
  EXPECT_GT(json["rows"][2]["busbw_gb_s"], 0);
  EXPECT_EQ(0, json["rows"][2]["wrong"]);
}

// A plugin that wraps another one and spoils one call: each kind of damage is found and described.
struct Damage {
  const char* operation;
  const char* mode;
  const char* message;
};

class DamagedPut : public testing::TestWithParam<Damage> {};
INSTANTIATE_TEST_SUITE_P(Perf, DamagedPut,
                         testing::Values(Damage{"put", "short", "wrong elements in the receive buffer"},
                                         Damage{"put", "elsewhere", "wrong elements in the receive buffer"},
                                         Damage{"get", "short", "wrong elements in the receive buffer"},
                                         Damage{"put_signal", "short", "wrong elements in the receive buffer"},
                                         Damage{"put_signal", "value", "the signal of rank "},
                                         Damage{"put_signal", "extra", "the word behind the signal of rank "},
                                         Damage{"put_signal", "no-data", "wrong elements in the receive buffer"},
                                         Damage{"alltoall_put", "short", "wrong elements in the receive buffer"},
                                         Damage{"alltoall_put", "value", "the signal of rank "}),
                         [](const auto& tested) {
                           std::string name = std::string(tested.param.operation) + "_" + tested.param.mode;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(UndamagedPut, SamePlugin_IsCorrect) {
  if (!has_rma()) GTEST_SKIP() << "the plugin has no RMA table";
  const Outcome outcome = run_puts({"put_signal", "-b", "32000", "-e", "32000", "-n", "4"}, "MUTATE_RMA",
                                   {"MUTATE_PLUGIN=" + setting("PERF_PLUGIN"), "MUTATE_MODE=none"});
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
}

TEST_P(DamagedPut, OneCall_IsFound) {
  if (!has_rma()) GTEST_SKIP() << "the plugin has no RMA table";
  const Damage& damage = GetParam();
  const Arguments arguments{damage.operation, "-b", "32000", "-e", "32000", "-n", "4", "-w", "0", "-c", "4"};
  const PerfProcess::Environment spoil{"MUTATE_PLUGIN=" + setting("PERF_PLUGIN"),
                                       std::string("MUTATE_MODE=") + damage.mode, "MUTATE_NTH=2"};
  const Outcome outcome = run_puts(arguments, "MUTATE_RMA", spoil);
  EXPECT_EQ(kWrong, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find(damage.message)) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("FAILED")) << outcome.output;
}

TEST(PutOptions, PluginWithoutRmaTable_IsRefused) {
  const Outcome outcome = run_puts({"put"}, "SOCKET_PLUGIN");
  EXPECT_EQ(kFailed, outcome.status) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("does not export an RMA table")) << outcome.output;
  EXPECT_NE(std::string::npos, outcome.output.find("Next: ")) << outcome.output;
}

TEST(PutOptions, WithoutMeaning_AreRefusedByName) {
  const std::vector<Arguments> refused{
      {"put", "--channels", "2"},  {"put", "--chunk", "4K"},
      {"get", "--group", "2"},     {"put", "--merge", "1"},
      {"put", "--cuda", "x.so"},   {"alltoall_put", "--depth", "4"},
      {"put", "--memory", "cuda"}, {"put_signal", "--format", "nccl-tests"},
      {"put", "--api", "12"},      {"alltoall", "--contexts", "2"},
      {"alltoall", "--api", "13"},
  };
  for (const Arguments& arguments : refused) {
    const Outcome outcome = run_puts(arguments);
    EXPECT_EQ(kUsage, outcome.status) << arguments[1] << ": " << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find(arguments[1])) << outcome.output;
    EXPECT_NE(std::string::npos, outcome.output.find("Next: ")) << outcome.output;
  }
}

}  // namespace
}  // namespace verbatim::perf
