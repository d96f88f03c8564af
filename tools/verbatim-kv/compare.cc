#include "verbatim-kv/compare.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/table.h"
#include "nixl/run.h"
#include "ranks/comparison.h"
#include "verbatim-kv/nixl_faults.h"
#include "verbatim-kv/report.h"

namespace verbatim::kv {
namespace {

using ranks::Json;

std::string counters_of(const Json& report) {
  std::string all;
  for (const Json& rank : report.at("ranks")) {
    const std::string one = rank.at("plugin_counters");
    if (all.empty()) all = one;
    if (all != one) return "differ";
  }
  return all;
}

std::string memory_of(const Options& options) {
  const bool is_gpu = is_over_nccl(options.mode) || options.memory == memory::Kind::kCuda;
  return is_gpu ? "GPU memory" : memory::describe_host_memory(options.pages);
}

ranks::Variant over_plugin_or_nixl(const std::string& name) {
  ranks::Variant variant = name == nixl::kName ? ranks::Variant{"NIXL", {"--mode=nixl"}, {}} : ranks::over_plugin(name);
  if (std::getenv(nixl::kLinkLayer) == nullptr) variant.environment.emplace_back(nixl::kLinkLayer, nixl::kInfiniBand);
  return variant;
}

ranks::Comparison run_modes(const Options& options, int argc, char** argv) {
  ranks::Comparison all;
  const bool over_nccl = is_over_nccl(options.mode);
  for (const Mode mode : {over_nccl ? Mode::kNccl : Mode::kDirect, over_nccl ? Mode::kNcclPut : Mode::kPut}) {
    const std::string name = mode_name(mode);
    all.names.push_back(name);
    all.variants.push_back({name, {"--mode=" + name, "--warmup=" + std::to_string(options.warmup)}, {}});
  }
  const ranks::ExcludedOptions excluded{{"--compare", "--rounds", "--json", "--mode", "--warmup"}, {}};
  all.reports = ranks::run_rounds(all.variants, options.rounds, excluded, argc, argv);
  return all;
}

ranks::Comparison run_all(const Options& options, int argc, char** argv) {
  if (options.compares_modes()) return run_modes(options, argc, argv);
  std::string list = options.compare == nixl::kName ? options.plugin + "," + nixl::kName : options.compare;
  auto* over = is_over_nccl(options.mode) ? ranks::over_network : ranks::over_plugin;
  if (options.compares_with_nixl()) {
    static_cast<void>(nixl::version(options.python));  // throws Failure before the first run
    over = over_plugin_or_nixl;
  }
  return ranks::run_comparison(list, over, options.warmup, options.rounds, argc, argv);
}

}  // namespace

ExitStatus run_compare(const Options& options, int argc, char** argv) {
  const auto [names, variants, reports] = run_all(options, argc, argv);
  std::printf(
      "# %s, %d prefill and %d decode ranks, medians of %d rounds, each without %zu warm-up requests; "
      "ratio: rate of the first entry over that of the entry; all entries: %s\n",
      options.preset.c_str(), options.prefills, options.decodes, options.rounds, options.warmup,
      memory_of(options).c_str());
  std::printf(
      "# GB/s (10^9 bytes), messages/s, requests/s, p50, p99: of requests from their start to their end\n"
      "# counters: the plugin's own bytes beside those of the run (absent: the plugin counts none)\n");
  const cli::Table table({{"over", -28},
                          {"family", 8},
                          {"GB/s", 10, 3},
                          {"messages/s", 12},
                          {"requests/s", 12, 1},
                          {"p50(ms)", 10, 3},
                          {"p99(ms)", 10, 3},
                          {"counters", 10},
                          {"ratio", 8, 2}});
  table.print_titles(stdout);
  Json json = Json::array();
  double most_checks = 0;  // percent
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const std::vector<Json>& runs = reports.by_variant[i];
    Json entry{{"over", names[i]}, {"families", Json::array()}};
    for (std::size_t family = 0; family < options.geometries.size(); ++family) {
      const std::string& name = options.geometries[family].name;
      const std::string place = "/families/" + std::to_string(family) + "/";
      most_checks = std::max(most_checks, ranks::median(ranks::values_at(runs, place + "check_percent")));
      const auto gb_s = ranks::values_at(runs, place + "gb_s");
      const auto messages_per_s = ranks::values_at(runs, place + "messages_per_s");
      const auto requests_per_s = ranks::values_at(runs, place + "requests_per_s");
      const auto p50_ms = ranks::values_at(runs, place + "latency_p50_ms");
      const auto p99_ms = ranks::values_at(runs, place + "latency_p99_ms");
      const double ratio = ranks::median_ratio(ranks::values_at(reports.by_variant.front(), place + "gb_s"), gb_s);
      table.print_row(stdout, {variants[i].name, name, ranks::median(gb_s), ranks::median(messages_per_s),
                               ranks::median(requests_per_s), ranks::median(p50_ms), ranks::median(p99_ms),
                               counters_of(runs.back()), ratio});
      entry["families"].push_back({{"name", name},
                                   {"gb_s", gb_s},
                                   {"messages_per_s", messages_per_s},
                                   {"requests_per_s", requests_per_s},
                                   {"latency_p50_ms", p50_ms},
                                   {"latency_p99_ms", p99_ms},
                                   {"ratio", ratio}});
    }
    entry["last_run"] = runs.back();
    json.push_back(entry);
  }
  if (most_checks >= kMuchPercent) {
    std::printf(
        "# filling and comparing bytes took up to %.0f %% of the time: the ratios are too near to 1. Next: "
        "--no-check\n",
        most_checks);
  }
  if (options.compares_with_nixl()) {
    const Json bad_lists = compare_bad_lists(options, variants, argc, argv);
    for (std::size_t i = 0; i < bad_lists.size(); ++i) json[i]["bad_lists"] = bad_lists[i];
  }
  if (!options.json.empty()) ranks::write_json(json, options.json);
  return reports.status;
}

}  // namespace verbatim::kv
