// verbatim-perf under the names of nccl-tests' programs, with its options. nccl_tests_reader.h reads what it prints.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nccl_tests_reader.h"
#include "perf_run.h"

namespace verbatim::perf {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

// Runs verbatim-perf by a link with this name. Its standard error is in the output, too: its lines begin with
// "verbatim-perf: note:", and are taken out into `notes`.
Outcome run_program(const std::string& name, Words arguments, std::vector<std::string>* notes = nullptr) {
  const fs::path directory = fs::path(testing::TempDir()) / ("nccl-tests-" + std::to_string(::getpid()));
  fs::create_directories(directory);
  const fs::path link = directory / name;
  fs::remove(link);
  fs::create_symlink(setting("PERF_TOOL"), link);
  ::setenv("NCCL_TESTS_PROGRAM", link.c_str(), 1);
  arguments.insert(arguments.end(), {"-T", "60"});
  Outcome outcome =
      PerfProcess(arguments, {"NCCL_NET_PLUGIN=" + setting("PERF_PLUGIN")}, "NCCL_TESTS_PROGRAM").finish();
  fs::remove_all(directory);
  std::istringstream lines(outcome.output);
  outcome.output.clear();
  for (std::string line; std::getline(lines, line);) {
    const bool is_note = line.starts_with("verbatim-perf: note: ");
    if (is_note && notes != nullptr) notes->push_back(line);
    if (!is_note) outcome.output += line + "\n";
  }
  return outcome;
}

NcclTestsOutput output_of(const std::string& name, const Words& arguments, const NcclTestsColumns& columns = {}) {
  const Outcome outcome = run_program(name, arguments);
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  try {
    return read_nccl_tests(outcome.output, columns);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what() << "\n" << outcome.output;
    return {};
  }
}

struct Program {
  const char* operation;
  const char* redop;
  int root;
  bool has_result_in_place;
  std::vector<std::size_t> sizes;   // of -b 96 -e 1536K -f 128 with 4 ranks
  std::vector<std::size_t> counts;  // of floats
};

const std::vector<std::size_t> kSizes{96, 12'288, 1'572'864};
const std::vector<std::size_t> kCounts{24, 3'072, 393'216};
const std::vector<std::size_t> kSizesInParts{64, 12'288, 1'572'864};  // parts of 16 bytes
const std::vector<std::size_t> kCountsOfParts{4, 768, 98'304};

// src/*.cu of nccl-tests: GetCollByteCount, the call of TimeTest, and reportErrors.
const Program kPrograms[] = {
    {"all_reduce", "sum", -1, true, kSizes, kCounts},
    {"all_gather", "none", -1, true, kSizesInParts, kCountsOfParts},
    {"broadcast", "none", 0, true, kSizes, kCounts},
    {"reduce_scatter", "sum", -1, true, kSizesInParts, kCountsOfParts},
    {"reduce", "sum", 0, true, kSizes, kCounts},
    {"alltoall", "none", -1, false, kSizesInParts, kCountsOfParts},
    // 64 bytes in 6 shares, of which distances 1, 2 and 3 get 10, 21 and 32 bytes: down to 16.
    {"alltoallv", "none", -1, false, {48, 12'288, 1'572'864}, kCountsOfParts},
    {"scatter", "none", 0, true, kSizesInParts, kCountsOfParts},
    {"gather", "none", 0, true, kSizesInParts, kCountsOfParts},
    {"sendrecv", "sum", -1, false, kSizes, kCounts},
    {"hypercube", "", -1, true, kSizesInParts, kCountsOfParts},
};

class NcclTestsProgram : public testing::TestWithParam<Program> {};
INSTANTIATE_TEST_SUITE_P(Perf, NcclTestsProgram, testing::ValuesIn(kPrograms),
                         [](const auto& tested) { return std::string(tested.param.operation); });

TEST_P(NcclTestsProgram, Output_IsThatOfNcclTests) {
  const Program& program = GetParam();
  const std::string name = std::string(program.operation) + "_perf";
  const NcclTestsOutput output = output_of(
      name, {"-t", "2", "-g", "2", "-b", "96", "-e", "1536K", "-f", "128", "-n", "3", "-c", "2", "--chunk", "64K"});
  EXPECT_EQ(name, output.program);
  EXPECT_EQ(2, output.threads);
  EXPECT_EQ(2, output.gpus);
  EXPECT_EQ(96U, output.min_bytes);
  EXPECT_EQ(1536U << 10, output.max_bytes);
  EXPECT_EQ(128U, output.step);
  EXPECT_EQ("factor", output.step_kind);
  EXPECT_EQ(3, output.iterations);
  EXPECT_EQ(1, output.warmup_iterations);
  EXPECT_EQ(2, output.validation);
  ASSERT_EQ(4U, output.devices.size());
  for (int rank = 0; rank < 4; ++rank) {
    const NcclTestsDevice& device = output.devices[static_cast<std::size_t>(rank)];
    EXPECT_EQ(rank, device.rank);
    EXPECT_EQ(rank, device.device);
    EXPECT_GT(device.pid, 0);
  }
  ASSERT_EQ(3U, output.rows.size());
  double busbw = 0;
  for (std::size_t i = 0; i < output.rows.size(); ++i) {
    const NcclTestsRow& row = output.rows[i];
    EXPECT_EQ(program.sizes[i], row.size);
    EXPECT_EQ(program.counts[i], row.count);
    EXPECT_EQ("float", row.type);
    EXPECT_EQ(program.redop, row.redop);
    EXPECT_EQ(program.root, row.root);
    EXPECT_EQ(0, row.out_of_place.wrong);
    EXPECT_EQ(program.has_result_in_place ? std::optional<double>(0) : std::nullopt, row.in_place.wrong);
    for (const NcclTestsRun& run : {row.out_of_place, row.in_place}) {
      EXPECT_GT(run.time_us, 0);
      busbw += run.busbw / 6;
    }
  }
  EXPECT_EQ(0, output.out_of_bounds);
  EXPECT_EQ("", output.busbw_result);
  EXPECT_NEAR(busbw, output.busbw, 0.01);  // rows have two digits
}

TEST(NcclTestsOptions, AllTypesReductionsAndRoots_AreCorrect) {
  constexpr std::size_t kAllTypesAndReductions = 12 * 6;
  const Words all{"-g", "3", "-b", "20000", "-e", "20000", "-n",     "1",
                  "-w", "0", "-d", "all",   "-o", "all",   "--root", "-1"};
  for (const auto& [program, roots] : std::vector<std::pair<const char*, std::size_t>>{
           {"all_reduce_perf", 1}, {"reduce_scatter_perf", 1}, {"reduce_perf", 3}}) {
    const NcclTestsOutput output = output_of(program, all);
    EXPECT_EQ(kAllTypesAndReductions * roots, output.rows.size());
    for (const NcclTestsRow& row : output.rows) {
      EXPECT_EQ(0, row.out_of_place.wrong) << program << " " << row.type << " " << row.redop << " " << row.root;
      EXPECT_EQ(0, row.in_place.wrong) << program << " " << row.type << " " << row.redop << " " << row.root;
    }
  }
  EXPECT_EQ(12U * 3, output_of("gather_perf", all).rows.size());
}

TEST(NcclTestsOptions, TimesTimestampsCyclesAndOffsets_AreShown) {
  const fs::path json = fs::path(testing::TempDir()) / ("nccl-tests-" + std::to_string(::getpid()) + ".json");
  const NcclTestsOutput output =
      output_of("all_gather_perf", {"-b", "8K", "-e", "16K", "-i", "8K", "-n", "9",  "-I",   "1",  "-K",
                                    "2",  "-S", "1",  "-N",  "2",  "-u", "3",  "-d", "half", "-J", json.string()},
                {.per_iteration = true, .timestamps = true});
  EXPECT_EQ(3, output.unalign);
  EXPECT_EQ("bytes", output.step_kind);
  ASSERT_EQ(4U, output.rows.size());
  for (const NcclTestsRow& row : output.rows) {
    EXPECT_EQ(19U, row.timestamp.size()) << row.timestamp;
    for (const NcclTestsRun& run : {row.out_of_place, row.in_place}) {
      EXPECT_EQ(0, run.wrong);
      const auto& [min, max, p99, variation] = run.iterations;
      EXPECT_GT(min, 0);
      EXPECT_LE(min, p99);
      EXPECT_LE(p99, max);
    }
  }
  // Its name is there already: the next file has another.
  output_of("all_gather_perf", {"-b", "8K", "-e", "8K", "-n", "1", "-J", json.string()});
  const auto read = nlohmann::json::parse(std::ifstream(json), nullptr, false);
  const bool has_second = fs::exists(json.string() + ".0");
  fs::remove(json);
  fs::remove(json.string() + ".0");
  EXPECT_TRUE(has_second);
  ASSERT_TRUE(read.is_object());
  EXPECT_EQ(3, read["version"]);
  EXPECT_EQ(2U, read["config"]["devices"].size());
  ASSERT_EQ(4U, read["results"].size());
  EXPECT_EQ("    -1", read["results"][1]["root"]);
  EXPECT_EQ(0, read["results"][1]["out_of_place"]["nwrong"]);
  const auto& times = read["results"][1]["in_place_per_iter"];
  EXPECT_EQ(9U, times["times_us"].size());
  ASSERT_EQ(2U, times["per_process_max_times_us"].size());
  for (std::size_t i = 0; i < 9; ++i) {
    const double slowest = std::max(times["per_process_max_times_us"][0][i].get<double>(),
                                    times["per_process_max_times_us"][1][i].get<double>());
    EXPECT_EQ(slowest, times["times_us"][i]);
  }
}

TEST(NcclTestsOptions, OptionsOfGpus_AreNoted) {
  std::vector<std::string> notes;
  const Outcome outcome = run_program(
      "sendrecv_perf", {"-b", "8", "-e", "8", "-z", "1", "-G", "2", "--memory", "1", "-R", "2", "-D", "1"}, &notes);
  EXPECT_EQ(kCorrect, outcome.status) << outcome.output;
  EXPECT_NO_THROW(read_nccl_tests(outcome.output, {})) << outcome.output;
  ASSERT_EQ(6U, notes.size());  // the last one names the plugin
  EXPECT_NE(std::string::npos, notes[5].find(setting("PERF_PLUGIN"))) << notes[5];
  EXPECT_EQ(kUsage, run_program("sendrecv_perf", {"-q", "1"}).status);
  EXPECT_EQ(kUsage, run_program("sendrecv_perf", {"-d", "float32"}).status);
}

TEST(NcclTestsOptions, OneRank_IsNoted) {
  const auto notes_of = [](const char* gpus) {
    std::vector<std::string> notes;
    EXPECT_EQ(kCorrect, run_program("all_reduce_perf", {"-g", gpus, "-b", "8", "-e", "8", "-n", "1"}, &notes).status);
    return std::count(notes.begin(), notes.end(), "verbatim-perf: note: one rank: no bytes are sent between ranks");
  };
  EXPECT_EQ(1, notes_of("1"));
  EXPECT_EQ(0, notes_of("2"));
}

TEST(NcclTestsOptions, RequiredBandwidth_IsJudged) {
  const Words small{"-b", "8", "-e", "8", "-n", "1"};
  ::setenv("NCCL_TESTS_MIN_BW", "1e6", 1);
  const Outcome outcome = run_program("sendrecv_perf", small);
  ::setenv("NCCL_TESTS_MIN_BW", "0", 1);
  const NcclTestsOutput enough = output_of("sendrecv_perf", small);
  ::unsetenv("NCCL_TESTS_MIN_BW");
  EXPECT_EQ(kWrong, outcome.status);
  EXPECT_EQ("FAILED", read_nccl_tests(outcome.output, {}).busbw_result);
  EXPECT_EQ("OK", enough.busbw_result);
}

// A line that is missing, or has one space more or one character less, is an error.
TEST(NcclTestsReader, ChangedOutput_IsRefused) {
  const Outcome outcome = run_program("all_reduce_perf", {"-b", "8", "-e", "8", "-n", "1"});
  ASSERT_NO_THROW(read_nccl_tests(outcome.output, {})) << outcome.output;
  std::vector<std::string> lines;
  std::istringstream stream(outcome.output);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  const auto read_with = [&lines](std::size_t changed, const std::string& text) {
    std::string output;
    for (std::size_t i = 0; i < lines.size(); ++i) output += i == changed ? text : lines[i] + "\n";
    read_nccl_tests(output, {});
  };
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const bool is_device = lines[i].starts_with("#  Rank");  // as many as there are
    const bool is_row = lines[i].starts_with(" ");
    std::vector<std::string> changed{" " + lines[i] + "\n"};
    if (!is_device && !is_row) changed.emplace_back("");
    if (!is_device) changed.push_back(lines[i] + "x\n");
    if (lines[i].size() > 1) changed.push_back(lines[i].substr(1) + "\n");
    for (const std::string& text : changed) EXPECT_THROW(read_with(i, text), std::runtime_error) << text;
  }
}

}  // namespace
}  // namespace verbatim::perf
