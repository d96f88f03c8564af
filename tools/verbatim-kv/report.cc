#include "verbatim-kv/report.h"

#include <algorithm>
#include <vector>

#include "cli/table.h"
#include "ranks/statistics.h"
#include "verbatim-kv/nixl_faults.h"
#include "verbatim-kv/plugin_counters.h"

namespace verbatim::kv {
namespace {

using ranks::Json;

constexpr double kMiB = 1024.0 * 1024.0;

double gb_per_s(const FamilyStats& stats) {
  return stats.timed_ns == 0 ? 0 : static_cast<double>(stats.timed_bytes) / static_cast<double>(stats.timed_ns);
}

double messages_per_s(const FamilyStats& stats) {
  if (stats.timed_ns == 0) return 0;
  return 1e9 * static_cast<double>(stats.timed_messages) / static_cast<double>(stats.timed_ns);
}

double requests_per_s(const FamilyStats& stats) {
  if (stats.timed_ns == 0) return 0;
  return 1e9 * static_cast<double>(stats.latencies_ns.size()) / static_cast<double>(stats.timed_ns);
}

// The time of validation at both ends on all ranks, in percent of the time of the transfers.
double validation_percent(const FamilyStats& stats) {
  if (stats.elapsed_ns == 0) return 0;
  return 100.0 * static_cast<double>(stats.validation_ns) / static_cast<double>(stats.elapsed_ns);
}

// Above each table of families.
constexpr const char* kFamiliesLegend =
    "# requests: served, data and notification; block(B): bytes of a block, each a message; messages, bytes: received\n"
    "# GB/s (10^9 bytes), p50, p99: without the warm-up, of requests from their start to their end, checks included\n"
    "# valid(%): validation of block lists at both ends, all ranks, in percent of the time; rejected: invalid lists\n"
    "# fresh, staged, recomp: requests that failed and got a new connection, a copy over TCP, or must be recomputed\n"
    "# #wrong: wrong bytes\n";

double ms(std::uint64_t ns) {
  return static_cast<double>(ns) / 1e6;
}

std::uint64_t fallbacks(const FamilyStats& stats, FallbackStage stage) {
  return stats.fallbacks[static_cast<int>(stage)];
}

void print_families(std::FILE* out, const std::vector<FamilyReport>& families) {
  std::fputs(kFamiliesLegend, out);
  const cli::Table table({{"family", 8},
                          {"requests", 10},
                          {"block(B)", 9},
                          {"messages", 12},
                          {"bytes", 16},
                          {"GB/s", 8, 3},
                          {"p50(ms)", 9, 3},
                          {"p99(ms)", 9, 3},
                          {"valid(%)", 8, 3},
                          {"rejected", 8},
                          {"fresh", 6},
                          {"staged", 6},
                          {"recomp", 6},
                          {"#wrong", 8}});
  table.print_titles(out);
  for (const FamilyReport& family : families) {
    const FamilyStats& stats = family.stats;
    table.print_row(out,
                    {family.geometry.name, stats.served, family.geometry.part_bytes(), stats.received_messages,
                     stats.received_bytes, gb_per_s(stats), ms(ranks::percentile(stats.latencies_ns, 0.5)),
                     ms(ranks::percentile(stats.latencies_ns, 0.99)), validation_percent(stats), stats.rejected.size(),
                     fallbacks(stats, FallbackStage::kFresh), fallbacks(stats, FallbackStage::kStaged),
                     fallbacks(stats, FallbackStage::kRecompute), stats.wrong_bytes});
  }
  for (const FamilyReport& family : families) {
    const double percent = check_percent(family.stats.check_ns, family.stats.elapsed_ns);
    if (percent < kMuchPercent) continue;
    std::fprintf(
        out,
        "# %s: filling and comparing bytes took %.0f %% of the time: GB/s and latencies are those of the checks. "
        "Next: --no-check for timing\n",
        family.geometry.name.c_str(), percent);
  }
}

Json json_of(const FamilyReport& family) {
  const FamilyStats& stats = family.stats;
  Json json{
      {"name", family.geometry.name},
      {"dtype", family.geometry.dtype},
      {"layers", family.geometry.layers},
      {"entries", family.geometry.entries},
      {"block_tokens", family.geometry.block_tokens},
      {"prefill_block_bytes", family.geometry.prefill_bytes},
      {"decode_block_bytes", family.geometry.part_bytes()},
      {"prefill_blocks", family.blocks[0]},
      {"decode_blocks", family.blocks[1]},
      {"plan", {{"requests", family.plan.requests}, {"messages", family.plan.messages}, {"bytes", family.plan.bytes}}},
      {"gb_s", gb_per_s(stats)},
      {"messages_per_s", messages_per_s(stats)},
      {"requests_per_s", requests_per_s(stats)},
      {"latency_p50_ms", ms(ranks::percentile(stats.latencies_ns, 0.5))},
      {"latency_p99_ms", ms(ranks::percentile(stats.latencies_ns, 0.99))},
      {"validation_percent", validation_percent(stats)},
      {"check_percent", check_percent(stats.check_ns, stats.elapsed_ns)},
      {"longest_fallback_ms", ms(stats.fallback_ns)}};
  Json counted = to_json(stats);
  counted.erase("latencies_ns");
  json.update(counted);
  return json;
}

}  // namespace

double check_percent(std::uint64_t check_ns, std::uint64_t elapsed_ns) {
  return elapsed_ns == 0 ? 0 : 100.0 * static_cast<double>(check_ns) / static_cast<double>(elapsed_ns);
}

Plan plan_of(const Geometry& geometry, const std::vector<Request>& requests) {
  Plan plan;
  for (const Request& request : requests) {
    const std::size_t blocks = request.blocks(geometry.block_tokens) - request.hit_blocks(geometry.block_tokens);
    plan.messages += blocks * geometry.layers * geometry.entries * geometry.tp_ratio;
    plan.requests += geometry.tp_ratio;
  }
  plan.bytes = plan.messages * geometry.part_bytes();
  return plan;
}

void Report::add_all_ranks(ranks::CoordinatorConnection& coordinator, const RankMemory& memory,
                           const std::optional<std::string>& counters, const std::vector<const FamilyStats*>& stats,
                           bool puts) {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  for (const FamilyStats* const family : stats) {
    sent_bytes += family->sent_bytes;
    received_bytes += family->received_bytes;
  }
  Json own;
  own["memory"] = {memory.bytes, memory.allocations, memory.registrations, memory.reg_mr_calls, memory.damage};
  own["plugin_counters"] =
      puts ? compare_put_counters(counters, sent_bytes) : compare_plugin_counters(counters, sent_bytes, received_bytes);
  own["families"] = ranks::Json::array();
  for (const FamilyStats* const family : stats) own["families"].push_back(to_json(*family));
  for (const std::string& text : coordinator.all_gather(own.dump())) {
    const Json other = Json::parse(text);
    const auto counts = other.at("memory").get<std::vector<std::uint64_t>>();
    add_rank({counts.at(0), counts.at(1), counts.at(2), counts.at(3), counts.at(4), other.at("plugin_counters")},
             other.at("families"));
  }
}

void Report::add_rank(const RankMemory& memory, const Json& json) {
  ranks.push_back(memory);
  for (std::size_t i = 0; i < families.size(); ++i) families[i].stats.add(from_json(json.at(i)));
}

std::uint64_t Report::wrong() const {
  std::uint64_t wrong = 0;
  for (const FamilyReport& family : families) wrong += family.stats.wrong_bytes + family.stats.crc_errors;
  for (const RankMemory& rank : ranks) wrong += rank.damage;
  return wrong;
}

// After a failed connection the counters may differ, because messages in transfer may or may not have been counted.
bool Report::counters_differ() const {
  const auto fell_back = [](const FamilyReport& family) {
    return std::any_of(std::begin(family.stats.fallbacks), std::end(family.stats.fallbacks),
                       [](std::uint64_t count) { return count > 0; });
  };
  if (std::any_of(families.begin(), families.end(), fell_back)) return false;
  return std::any_of(ranks.begin(), ranks.end(), [](const RankMemory& rank) {
    return rank.plugin_counters != "absent" && rank.plugin_counters != "equal";
  });
}

ExitStatus Report::status() const {
  if (wrong() > 0 || counters_differ()) return ExitStatus::kWrong;
  const auto any = [&](auto has) {
    return std::any_of(families.begin(), families.end(), [&](const FamilyReport& family) { return has(family.stats); });
  };
  if (any([](const FamilyStats& stats) { return !stats.lost.empty(); })) return ExitStatus::kRecompute;
  if (!bad_lists.empty() || any([](const FamilyStats& stats) { return !stats.rejected.empty(); }))
    return ExitStatus::kRejected;
  return ExitStatus::kOk;
}

void print(std::FILE* out, const Report& report) {
  const Options& options = report.options;
  std::fprintf(out, "# KV caches over %s\n", report.transport.c_str());
  std::fprintf(out, "# %s with 1/%u of its layers; %d prefill and %d decode ranks, TP ratio %u\n",
               options.preset.c_str(), options.scale, options.prefills, options.decodes, options.tp_ratio);
  std::fprintf(out, "# requests of up to %llu blocks, %zu in flight per decode rank; fragmentation %g; %s\n",
               static_cast<unsigned long long>(report.longest_blocks), options.concurrency, options.fragmentation,
               options.mode == Mode::kPut       ? "a put for each block, the last one with the signal"
               : options.mode == Mode::kNcclPut ? "a put with a signal for each block"
                                                : ("receives of up to " + std::to_string(report.group)).c_str());
  std::fprintf(out, "# memory of rank 0: %s\n", report.memory_of_rank_0.c_str());
  if (options.warmup > 0) std::fprintf(out, "# the first %zu requests are warm-up and not timed\n", options.warmup);
  std::uint64_t bytes = 0;
  std::uint64_t allocations = 0;
  std::uint64_t registrations = 0;
  for (const RankMemory& rank : report.ranks) {
    bytes += rank.bytes;
    allocations += rank.allocations;
    registrations += rank.registrations;
  }
  std::fprintf(out, "# memory of all ranks: %.1f MiB in %llu allocations (%s), %llu registrations for both families\n",
               static_cast<double>(bytes) / kMiB, static_cast<unsigned long long>(allocations),
               allocations_name(options.allocations), static_cast<unsigned long long>(registrations));
  std::fputs("#\n", out);
  print_families(out, report.families);
  for (const FamilyReport& family : report.families) {
    if (family.stats.groups.empty()) continue;
    std::fprintf(out, "# receives of %s by members:", family.geometry.name.c_str());
    for (const auto& [members, count] : family.stats.groups) {
      std::fprintf(out, " %llu: %llu", static_cast<unsigned long long>(members),
                   static_cast<unsigned long long>(count));
    }
    std::fprintf(out, "\n");
  }
  for (const FamilyReport& family : report.families) {
    const char* const name = family.geometry.name.c_str();
    for (const RejectedRequest& rejected : family.stats.rejected) {
      std::fprintf(out, "# %s request %u rejected by the %s side: %s: %s\n", name, rejected.request,
                   rejected.found_by.c_str(), rejection_name(rejected.code), rejected.text.c_str());
    }
    for (const Lost& lost : family.stats.lost) {
      std::fprintf(out, "# %s request %u: %zu blocks from block %llu on must be recomputed\n", name, lost.request,
                   lost.blocks.size(), static_cast<unsigned long long>(lost.first));
    }
    for (const std::string& error_text : family.stats.errors) {
      std::fprintf(out, "# %s: %s\n", name, error_text.c_str());
    }
  }
  for (const Json& bad : report.bad_lists) std::fprintf(out, "# %s\n", describe_bad_list(bad).c_str());
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const std::string& counters = report.ranks[rank].plugin_counters;
    if (counters == "absent") continue;
    std::fprintf(out, "# rank %zu, bytes in the plugin's own counters: %s\n", rank, counters.c_str());
  }
  std::fprintf(out, "# Wrong bytes : %s\n",
               !options.check ? "not checked"
                              : (std::to_string(report.wrong()) + (report.wrong() == 0 ? " OK" : " FAILED")).c_str());
  std::fflush(out);
}

void write(const Report& report, const std::string& path) {
  const Options& options = report.options;
  const bool has_host_memory = !is_over_nccl(options.mode) && options.memory == memory::Kind::kHost;
  Json json{{"over", report.transport},
            {"mode", mode_name(options.mode)},
            {"memory", is_over_nccl(options.mode) ? "cuda" : memory::kind_name(options.memory)},
            {"memory_of_rank_0", report.memory_of_rank_0},
            {"pages", has_host_memory ? Json(memory::pages_name(options.pages)) : Json()},
            {"preset", options.preset},
            {"scale", options.scale},
            {"prefill", options.prefills},
            {"decode", options.decodes},
            {"tp_ratio", options.tp_ratio},
            {"concurrency", options.concurrency},
            {"warmup", options.warmup},
            {"fragmentation", options.fragmentation},
            {"allocations", allocations_name(options.allocations)},
            {"group", report.group},
            {"checked", options.check},
            {"wrong", options.check ? Json(report.wrong()) : Json()},
            {"status", static_cast<int>(report.status())},
            {"ranks", Json::array()},
            {"families", Json::array()}};
  for (const RankMemory& rank : report.ranks) {
    json["ranks"].push_back({{"bytes", rank.bytes},
                             {"allocations", rank.allocations},
                             {"registrations", rank.registrations},
                             {"reg_mr_calls", rank.reg_mr_calls},
                             {"damage", rank.damage},
                             {"plugin_counters", rank.plugin_counters}});
  }
  if (options.mode == Mode::kNixl) json["bad_lists"] = report.bad_lists;
  for (const FamilyReport& family : report.families) json["families"].push_back(json_of(family));
  ranks::write_json(json, path);
}

}  // namespace verbatim::kv
