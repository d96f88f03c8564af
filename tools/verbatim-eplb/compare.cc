#include "verbatim-eplb/compare.h"

#include <cstdio>
#include <string>
#include <vector>

#include "ranks/json.h"
#include "ranks/turns.h"

namespace verbatim::eplb {
namespace {

using ranks::Json;

struct Turns {
  std::vector<double> iteration_us;
  std::vector<double> p50_us;
  std::vector<double> p99_us;
  std::vector<double> gb_s;
  Json last;
};

Turns turns_of(const std::vector<Json>& reports) {
  Turns turns;
  for (const Json& report : reports) {
    turns.iteration_us.push_back(report["iteration_us"]);
    turns.p50_us.push_back(report["layer_time_us"]["p50"]);
    turns.p99_us.push_back(report["layer_time_us"]["p99"]);
    turns.gb_s.push_back(report["gb_s"]);
  }
  turns.last = reports.back();
  return turns;
}

// How many times as fast as `other` the first is: the median of the ratios within one turn.
double ratio(const Turns& first, const Turns& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < first.iteration_us.size(); ++i) {
    ratios.push_back(other.iteration_us[i] / first.iteration_us[i]);
  }
  return ranks::median(ratios);
}

}  // namespace

ranks::ExitStatus run_compare(const Options& options, int argc, char** argv) {
  std::vector<ranks::Variant> variants;
  const std::vector<std::string> names = ranks::names_in(options.compare);
  for (const std::string& name : names) {
    variants.push_back(options.over == Over::kNccl ? ranks::over_network(name) : ranks::over_plugin(name));
    variants.back().arguments.push_back("--warmup=" + std::to_string(options.warmup));
  }
  const ranks::Withheld withheld{{"--compare", "--turns", "--json", "--plugin", "--warmup"}, {}};
  const ranks::TurnReports reports = ranks::run_turns(variants, options.turns, withheld, argc, argv);
  const Turns first = turns_of(reports.by_variant.front());
  std::printf("# %s, %s, %d ranks, medians of %d turns; last column: how many times as fast as it the first is\n",
              mode_name(options.mode), options.policy.c_str(), options.job.size(), options.turns);
  std::printf("%-28s %14s %14s %14s %10s %10s %8s\n", "# over", "all layers ms", "layer p50 us", "layer p99 us", "GB/s",
              "counters", "ratio");
  Json json = Json::array();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const Turns turns = turns_of(reports.by_variant[i]);
    std::printf("%-28s %14.2f %14.1f %14.1f %10.3f %10s %8.2f\n", variants[i].name.c_str(),
                ranks::median(turns.iteration_us) / 1000, ranks::median(turns.p50_us), ranks::median(turns.p99_us),
                ranks::median(turns.gb_s), turns.last["by_rank"][0]["stats"].get<std::string>().c_str(),
                ratio(first, turns));
    json.push_back({{"over", names[i]},
                    {"iteration_us", turns.iteration_us},
                    {"layer_p50_us", turns.p50_us},
                    {"layer_p99_us", turns.p99_us},
                    {"gb_s", turns.gb_s},
                    {"ratio", ratio(first, turns)},
                    {"last_run", turns.last}});
  }
  if (!options.json.empty()) ranks::write_json(json, options.json);
  return reports.status;
}

}  // namespace verbatim::eplb
