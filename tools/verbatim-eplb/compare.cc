#include "verbatim-eplb/compare.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/table.h"
#include "nixl/run.h"
#include "ranks/comparison.h"
#include "ranks/json.h"

namespace verbatim::eplb {
namespace {

// Runs each schedule over the network or plugin of the command line.
ranks::Comparison compare_schedules(const Options& options, int argc, char** argv) {
  ranks::Comparison comparison;
  for (const PeersAtATime peers : {PeersAtATime::kAll, PeersAtATime::kOne}) {
    const std::string name = schedule_name(peers);
    comparison.names.push_back(name);
    comparison.variants.push_back(
        {"schedule " + name, {"--schedule=" + name, "--warmup=" + std::to_string(options.warmup)}});
  }
  const ranks::ExcludedOptions excluded{{"--compare", "--rounds", "--json", "--schedule", "--warmup"}, {}};
  comparison.reports = ranks::run_rounds(comparison.variants, options.rounds, excluded, argc, argv);
  return comparison;
}

// Runs each mode over the network or plugin of the command line. NCCL has no grouped receive.
ranks::Comparison compare_modes(const Options& options, int argc, char** argv) {
  ranks::Comparison comparison;
  for (const Mode mode : {Mode::kPacked, options.over == Over::kNccl ? Mode::kPerTensor : Mode::kDirect, Mode::kPut}) {
    const std::string name = mode_name(mode);
    comparison.names.push_back(name);
    comparison.variants.push_back({name, {"--mode=" + name, "--warmup=" + std::to_string(options.warmup)}, {}});
  }
  const ranks::ExcludedOptions excluded{{"--compare", "--rounds", "--json", "--mode", "--warmup"}, {}};
  comparison.reports = ranks::run_rounds(comparison.variants, options.rounds, excluded, argc, argv);
  return comparison;
}

// The buffers that the last run of an entry needs in addition to the weights, in MiB per rank.
double buffers_mib(const ranks::Json& report) {
  double bytes = 0;
  for (const char* const buffer : {"send_bytes", "recv_bytes", "new_rows_bytes"}) {
    bytes += report.at("memory").at(buffer).get<double>();
  }
  return bytes / (1024 * 1024);
}

// Runs packed and direct over the plugin of the command line, and READs of NIXL.
ranks::Comparison compare_with_nixl(const Options& options, int argc, char** argv) {
  static_cast<void>(nixl::version(options.python));  // throws Failure before the first run
  ranks::Comparison comparison;
  comparison.names = {"packed", "direct", nixl::kName};
  comparison.variants = {{"packed", {"--over=plugin", "--mode=packed"}, {}},
                         {"direct", {"--over=plugin", "--mode=direct"}, {}},
                         {"NIXL READ", {"--over=nixl", "--mode=direct"}, {}}};
  for (ranks::Variant& variant : comparison.variants) {
    variant.arguments.push_back("--warmup=" + std::to_string(options.warmup));
    if (std::getenv(nixl::kLinkLayer) == nullptr) variant.environment = {{nixl::kLinkLayer, nixl::kInfiniBand}};
  }
  const ranks::ExcludedOptions excluded{{"--compare", "--rounds", "--json", "--over", "--mode", "--warmup"}, {}};
  comparison.reports = ranks::run_rounds(comparison.variants, options.rounds, excluded, argc, argv);
  return comparison;
}

ranks::Comparison compare_all(const Options& options, int argc, char** argv) {
  if (options.compare == kCompareSchedules) return compare_schedules(options, argc, argv);
  if (options.compare == kCompareModes) return compare_modes(options, argc, argv);
  if (options.compare == nixl::kName) return compare_with_nixl(options, argc, argv);
  const auto over = options.over == Over::kNccl ? ranks::over_network : ranks::over_plugin;
  return ranks::run_comparison(options.compare, over, static_cast<std::size_t>(options.warmup), options.rounds, argc,
                               argv);
}

}  // namespace

ranks::ExitStatus run_compare(const Options& options, int argc, char** argv) {
  using ranks::Json;
  const auto [names, variants, reports] = compare_all(options, argc, argv);
  const auto first_us = ranks::values_at(reports.by_variant.front(), "/iteration_us");
  const bool is_gpu = options.over == Over::kNccl || options.memory == memory::Kind::kCuda;
  std::printf(
      "# %s, %s, %d ranks, medians of %d rounds; ratio: time of the entry over time of the first; all entries: %s\n",
      options.compare == nixl::kName     ? "beside NIXL"
      : options.compare == kCompareModes ? "modes"
                                         : mode_name(options.mode),
      options.policy.c_str(), options.job.size(), options.rounds,
      is_gpu ? "GPU memory" : memory::describe_host_memory(options.pages).c_str());
  std::printf(
      "# all layers, layer p50 and p99: times of the slowest rank, without checks; GB/s (10^9 bytes): over all ranks\n"
      "# buffers: of a rank besides the weights\n"
      "# counters: the plugin's own bytes beside those of the run (absent: it counts none)\n");
  const cli::Table table({{"over", -28},
                          {"all layers ms", 14, 2},
                          {"layer p50 us", 14, 1},
                          {"layer p99 us", 14, 1},
                          {"GB/s", 10, 3},
                          {"buffers MiB", 12, 2},
                          {"counters", 10},
                          {"ratio", 8, 2}});
  table.print_titles(stdout);
  Json json = Json::array();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const std::vector<Json>& runs = reports.by_variant[i];
    const auto iteration_us = ranks::values_at(runs, "/iteration_us");
    const auto p50_us = ranks::values_at(runs, "/layer_time_us/p50");
    const auto p99_us = ranks::values_at(runs, "/layer_time_us/p99");
    const auto gb_s = ranks::values_at(runs, "/gb_s");
    const double ratio = ranks::median_ratio(iteration_us, first_us);
    table.print_row(stdout, {variants[i].name, ranks::median(iteration_us) / 1000, ranks::median(p50_us),
                             ranks::median(p99_us), ranks::median(gb_s), buffers_mib(runs.back()),
                             runs.back()["by_rank"][0]["stats"].get<std::string>(), ratio});
    json.push_back({{"over", names[i]},
                    {"iteration_us", iteration_us},
                    {"layer_p50_us", p50_us},
                    {"layer_p99_us", p99_us},
                    {"gb_s", gb_s},
                    {"ratio", ratio},
                    {"last_run", runs.back()}});
  }
  if (!options.json.empty()) ranks::write_json(json, options.json);
  return reports.status;
}

}  // namespace verbatim::eplb
