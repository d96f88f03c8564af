#include "verbatim-kv/compare.h"

#include <cstdio>
#include <string>
#include <vector>

#include "ranks/turns.h"

namespace verbatim::kv {
namespace {

using ranks::Json;

// Of one family over one network.
struct Turns {
  std::vector<double> gb_s;
  std::vector<double> messages_per_s;
  std::vector<double> p50_ms;
  std::vector<double> p99_ms;
};

Turns turns_of(const std::vector<Json>& reports, std::size_t family) {
  Turns turns;
  for (const Json& report : reports) {
    const Json& counted = report.at("families").at(family);
    turns.gb_s.push_back(counted.at("gb_s"));
    turns.messages_per_s.push_back(counted.at("messages_per_s"));
    turns.p50_ms.push_back(counted.at("latency_p50_ms"));
    turns.p99_ms.push_back(counted.at("latency_p99_ms"));
  }
  return turns;
}

// How many times as fast as `other` the first is: the median of the ratios within one turn.
double ratio(const Turns& first, const Turns& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < first.gb_s.size(); ++i) {
    if (other.gb_s[i] > 0) ratios.push_back(first.gb_s[i] / other.gb_s[i]);
  }
  return ranks::median(ratios);
}

std::string counters_of(const Json& report) {
  std::string all;
  for (const Json& rank : report.at("ranks")) {
    const std::string one = rank.at("plugin_counters");
    if (all.empty()) all = one;
    if (all != one) return "differ";
  }
  return all;
}

}  // namespace

ExitStatus run_compare(const Options& options, int argc, char** argv) {
  const std::vector<std::string> names = ranks::names_in(options.compare);
  std::vector<ranks::Variant> variants;
  for (const std::string& name : names) {
    variants.push_back(options.mode == Mode::kNccl ? ranks::over_network(name) : ranks::over_plugin(name));
    variants.back().arguments.push_back("--warmup=" + std::to_string(options.warmup));
  }
  const ranks::Withheld withheld{{"--compare", "--turns", "--json", "--plugin", "--warmup"}, {}};
  const ranks::TurnReports reports = ranks::run_turns(variants, options.turns, withheld, argc, argv);
  std::printf(
      "# %s, %d prefill and %d decode ranks, medians of %d turns without %zu requests of warm-up each; "
      "last column: how many times as fast as it the first is\n",
      options.preset.c_str(), options.prefills, options.decodes, options.turns, options.warmup);
  std::printf("%-28s %8s %10s %12s %10s %10s %10s %8s\n", "# over", "family", "GB/s", "messages/s", "p50(ms)",
              "p99(ms)", "counters", "ratio");
  Json json = Json::array();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const std::vector<Json>& runs = reports.by_variant[i];
    Json entry{{"over", names[i]}, {"families", Json::array()}};
    for (std::size_t family = 0; family < options.geometries.size(); ++family) {
      const std::string& name = options.geometries[family].name;
      const Turns turns = turns_of(runs, family);
      const double times = ratio(turns_of(reports.by_variant.front(), family), turns);
      std::printf("%-28s %8s %10.3f %12.0f %10.3f %10.3f %10s %8.2f\n", variants[i].name.c_str(), name.c_str(),
                  ranks::median(turns.gb_s), ranks::median(turns.messages_per_s), ranks::median(turns.p50_ms),
                  ranks::median(turns.p99_ms), counters_of(runs.back()).c_str(), times);
      entry["families"].push_back({{"name", name},
                                   {"gb_s", turns.gb_s},
                                   {"messages_per_s", turns.messages_per_s},
                                   {"latency_p50_ms", turns.p50_ms},
                                   {"latency_p99_ms", turns.p99_ms},
                                   {"ratio", times}});
    }
    entry["last_run"] = runs.back();
    json.push_back(entry);
  }
  if (!options.json.empty()) ranks::write_json(json, options.json);
  return reports.status;
}

}  // namespace verbatim::kv
