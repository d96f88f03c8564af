#include "verbatim-perf/compare.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/table.h"
#include "ranks/comparison.h"
#include "ranks/json.h"

namespace verbatim::perf {

ExitStatus run_compare(const Options& options, int argc, char** argv) {
  using ranks::Json;
  ::unsetenv("NCCL_TESTS_MIN_BW");  // a run that does not reach it would end the comparison
  std::vector<ranks::Variant> variants;
  for (const std::string& plugin : options.compare) variants.push_back(ranks::over_plugin(plugin));
  const ranks::RoundReports reports =
      ranks::run_rounds(variants, options.rounds, {{"--compare", "--rounds", "--json"}, {}}, argc, argv);
  // The time that is compared: of pingpong the median, of other operations the mean.
  const bool latencies = options.operation == OperationKind::kPingPong;
  const std::string time = latencies ? "/latency_us/p50" : "/time_us";
  std::printf("# %s, medians of %d rounds; ratio: %s over that of the first plugin, median of the rounds\n",
              operation_name(options.operation), options.rounds, latencies ? "p50" : "time");
  std::vector<cli::Column> columns{{"size(B)", 12}, {"plugin", -33}, {"time(us)", 10, 2}, {"ratio", 7, 3}};
  if (latencies) {
    for (const char* title : {"min(us)", "p50(us)", "p99(us)", "p99.9(us)"}) columns.push_back({title, 9, 2});
  }
  const cli::Table table(columns);
  table.print_titles(stdout);
  Json json = Json::array();
  const std::size_t sizes = reports.by_variant.front().front()["rows"].size();
  for (std::size_t row = 0; row < sizes; ++row) {
    const std::string at = "/rows/" + std::to_string(row);
    const auto first = ranks::values_at(reports.by_variant.front(), at + time);
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const std::vector<Json>& runs = reports.by_variant[i];
      const auto bytes = runs.front()["rows"][row]["bytes"].get<std::size_t>();
      const double ratio = ranks::median_ratio(ranks::values_at(runs, at + time), first);
      Json line{{"bytes", bytes}, {"plugin", options.compare[i]}, {"ratio", ratio}};
      line["time_us"] = ranks::values_at(runs, at + "/time_us");
      std::vector<cli::Cell> cells{bytes, variants[i].name, ranks::median(line["time_us"]), ratio};
      if (latencies) {
        for (const char* name : {"min", "p50", "p99", "p99_9"}) {
          line["latency_us"][name] = ranks::values_at(runs, at + "/latency_us/" + name);
          cells.emplace_back(ranks::median(line["latency_us"][name]));
        }
      }
      table.print_row(stdout, cells);
      json.push_back(std::move(line));
    }
  }
  if (!options.json.empty()) ranks::write_json(json, options.json);
  return reports.status;
}

}  // namespace verbatim::perf
