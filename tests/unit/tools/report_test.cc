//: in verbatim_perf_test

// The report of verbatim-perf: result table, sums, and the text of the progress line.
#include "verbatim-perf/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "cli/table.h"
#include "ranks/json.h"
#include "ranks/progress_bar.h"

namespace verbatim::perf {
namespace {

template <typename Print>
std::string printed(const Print& print) {
  char text[4096] = {};
  std::FILE* const file = fmemopen(text, sizeof text, "w");
  print(file);
  std::fclose(file);
  return text;
}

Report two_rows() {
  Report report;
  report.rows = {{.bytes = 8, .count = 2, .time_us = 1.5, .algbw = 1, .busbw = 2, .wrong = 0},
                 {.bytes = 16, .count = 4, .time_us = 2.5, .algbw = 3, .busbw = 4, .wrong = 5}};
  return report;
}

TEST(Table, Cells_AreAlignedBelowTheirTitles) {
  const cli::Table table({{"first", 8}, {"name", -6}, {"time", 7, 2}, {"count", 6}});
  EXPECT_EQ("#  first name      time  count\n", printed([&](std::FILE* out) { table.print_titles(out); }));
  EXPECT_EQ("      -1 abc       1.50     12\n", printed([&](std::FILE* out) {
              table.print_row(out, {-1, "abc", 1.499999, 12U});
            }));
  EXPECT_EQ("       1 ab         N/A", table.row({std::size_t{1}, std::string("ab"), "N/A"}));
  EXPECT_EQ("123456789 longer than it", table.row({123456789, "longer than it"}));
}

TEST(Table, LeftFirstColumn_BeginsBelowItsTitle) {
  const cli::Table table({{"over", -8}, {"n", 3}});
  EXPECT_EQ("# over     n\n", printed([&](std::FILE* out) { table.print_titles(out); }));
  EXPECT_EQ("plugin     5", table.row({"plugin", 5}));
}

TEST(PerfReport, SeveralRows_SumWrongAndAverageBandwidth) {
  EXPECT_EQ(5U, two_rows().wrong());
  EXPECT_EQ(3.0, two_rows().average_busbw());
  EXPECT_EQ(0.0, Report{}.average_busbw());
}

TEST(ResultTable, Header_HasNcclTestsColumns) {
  const Report report = two_rows();
  const std::string header = printed([&](std::FILE* out) { print_header(out, report); });
  std::size_t at = 0;
  for (const char* column : {"size(B)", "count", "type", "time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong"}) {
    const std::size_t found = header.find(column, at);
    ASSERT_NE(std::string::npos, found) << column;
    at = found;
  }
  const std::string row = printed([&](std::FILE* out) { print_row(out, report, report.rows[1]); });
  EXPECT_EQ("          16            4    float        2.50       3.000       4.000        5\n", row);
}

TEST(ResultTable, NcclTestsFormat_FitsNumbersAndAveragesBothRuns) {
  Report report = two_rows();
  report.options.format = Format::kNcclTests;
  report.rows.resize(1);
  report.rows[0] = {.bytes = 16, .count = 4, .time_us = 12345.678, .algbw = 1234.56, .busbw = 2, .wrong = 5};
  report.rows[0].redop = "sum";
  report.rows[0].in_place = Measured{.time_us = 9999.996, .algbw = 123456, .busbw = 12'345'678};
  const auto row = [&] { return printed([&](std::FILE* out) { print_row(out, report, report.rows[0]); }); };
  EXPECT_EQ(
      "          16             4     float     sum      -1  12345.7  1234.6    2.00       5  10000.0  123456   1e+07  "
      "  N/A\n",
      row());
  report.rows[0].in_place->wrong = 12'345'678;
  EXPECT_TRUE(row().ends_with("  1.23457e+07\n")) << row();
  report.rows[0].in_place = Measured{.time_us = 1, .algbw = 1, .busbw = 4};
  const auto footer = [&] { return printed([&](std::FILE* out) { print_footer(out, report); }); };
  EXPECT_EQ(
      "# Out of bounds values : 5 FAILED\n# Avg bus bandwidth    : 3 \n#\n# Collective test concluded: "
      "all_reduce_perf\n#\n\n",
      footer());
  report.options.required_busbw = 3.3;
  EXPECT_NE(std::string::npos, footer().find("bandwidth    : 3 OK\n"));
  report.options.required_busbw = 3.4;
  EXPECT_NE(std::string::npos, footer().find("bandwidth    : 3 FAILED\n"));
}

// Of the iterations that are not skipped: the mean is 3, and the deviation the root of 2.
TEST(ResultTable, TimesOfIterations_AreMinimumMaximumPercentileAndVariation) {
  Report report = two_rows();
  report.options.format = Format::kNcclTests;
  report.options.per_iteration = true;
  report.options.per_iteration_skip = 1;
  report.rows[0].iterations = {{100, 5, 1, 3, 2, 1}, {1, 1, 4, 1, 1, 1}};
  EXPECT_TRUE(printed([&](std::FILE* out) {
                print_row(out, report, report.rows[0]);
              }).ends_with("       0     1.00     5.00     5.00    47.14\n"));
}

// Of 20 iterations in ascending order: the 11th, the 19th and the 20th.
TEST(NcclTestsJsonFile, TimesOfIterations_HavePercentiles) {
  Report report = two_rows();
  report.options.per_iteration = true;
  report.rows.resize(1);
  std::vector<double> times;
  for (int us = 20; us > 0; --us) times.push_back(us);
  report.rows[0].iterations = {times};
  report.rows[0].in_place = Measured{.iterations = {times}};
  const std::string path = testing::TempDir() + "percentiles_" + std::to_string(::getpid()) + ".json";
  NcclTestsJson(path, {}).write(report);
  const auto json = ranks::Json::parse(std::ifstream(path), nullptr, false);
  ::unlink(path.c_str());
  for (const char* run : {"out_of_place_per_iter", "in_place_per_iter"}) {
    const auto& summary = json["results"][0][run];
    EXPECT_EQ(11, summary["p50_us"]) << run;
    EXPECT_EQ(19, summary["p95_us"]) << run;
    EXPECT_EQ(20, summary["p99_us"]) << run;
  }
}

TEST(ResultTable, Footer_HasWrongCountAndAverage) {
  Report report = two_rows();
  const auto footer = [&report] { return printed([&](std::FILE* out) { print_footer(out, report); }); };
  EXPECT_EQ("# Wrong elements    : 5 FAILED\n# Avg bus bandwidth : 3 GB/s\n", footer());
  report.rows[1].wrong = 0;
  EXPECT_NE(std::string::npos, footer().find("0 OK"));
  report.options.check_iterations = 0;
  EXPECT_NE(std::string::npos, footer().find("not checked"));
}

TEST(ResultTable, FooterOfOneRank_ClaimsNothingBetweenRanks) {
  Report report;
  report.ranks.resize(1);
  EXPECT_EQ("# Wrong elements    : 0 OK (one rank: no bytes were sent between ranks)\n# Avg bus bandwidth : 0 GB/s\n",
            printed([&report](std::FILE* out) { print_footer(out, report); }));
  report.ranks.resize(2);
  EXPECT_EQ("# Wrong elements    : 0 OK\n# Avg bus bandwidth : 0 GB/s\n",
            printed([&report](std::FILE* out) { print_footer(out, report); }));
}

TEST(ProgressText, AnyShare_ShowsBarTimeAndRemainder) {
  EXPECT_EQ("[###############...............]  50 %  10 s, 10 s to go  8 B", ranks::progress_text(0.5, 10, "8 B"));
  EXPECT_EQ("[..............................]   0 %  3 s  8 B", ranks::progress_text(0, 3, "8 B"));
  EXPECT_EQ("[##############################] 100 %  3 s, 0 s to go  8 B", ranks::progress_text(1.2, 3, "8 B"));
}

}  // namespace
}  // namespace verbatim::perf
