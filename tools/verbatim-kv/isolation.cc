#include "verbatim-kv/isolation.h"

#include <cstdio>
#include <string>
#include <vector>

#include "cli/table.h"
#include "ranks/comparison.h"

namespace verbatim::kv {
namespace {

using ranks::Json;

enum Run : std::size_t { kAlone, kBoth, kKilled };
constexpr const char* kRunNames[] = {"LF alone", "both", "both, LF killed"};

const Json& family_of(const Json& report, const char* name) {
  for (const Json& family : report.at("families")) {
    if (family.at("name") == name) return family;
  }
  throw Failure(std::string("there is no family ") + name + " in a report");
}

std::vector<double> values_of(const std::vector<Json>& reports, const char* family, const char* what) {
  std::vector<double> values;
  for (const Json& report : reports) values.push_back(family_of(report, family).at(what));
  return values;
}

// Lists the counters of KV that differ between two runs. Only times may differ.
std::vector<std::string> differences(const Json& one, const Json& other) {
  std::vector<std::string> found;
  for (const char* const what :
       {"served", "served_bytes", "sent_messages", "sent_bytes", "received_messages", "received_bytes", "notifications",
        "connections", "crc_sum", "fresh_connections", "staged_copies", "recomputes"}) {
    if (one.at(what) == other.at(what)) continue;
    found.push_back(std::string("KV's ") + what + ": " + one.at(what).dump() +
                    "; with LF killed: " + other.at(what).dump());
  }
  return found;
}

}  // namespace

ExitStatus run_isolation(const Options& options, int argc, char** argv) {
  const std::size_t requests = make_requests(options).size();
  const std::string middle = std::to_string(options.warmup + (requests - options.warmup) / 2);
  const std::string warmup = "--warmup=" + std::to_string(options.warmup);
  const std::vector<ranks::Variant> variants{
      {kRunNames[kAlone], {warmup, "--idle=kv"}},
      {kRunNames[kBoth], {warmup}},
      {kRunNames[kKilled], {warmup, "--inject=kill,family=lf,request=" + middle}}};
  const ranks::RoundReports reports =
      ranks::run_rounds(variants, options.rounds, {{"--rounds", "--json", "--warmup"}, {"--isolation"}}, argc, argv);
  const auto& alone = reports.by_variant[kAlone];
  const auto& both = reports.by_variant[kBoth];
  const auto& killed = reports.by_variant[kKilled];

  std::printf("# %s, %zu requests, medians of %d rounds, each without %zu warm-up requests\n", options.preset.c_str(),
              requests, options.rounds, options.warmup);
  std::printf(
      "# GB/s (10^9 bytes), p50 and p99 of requests from their start to their end\n"
      "# LF fresh: requests of LF that got a new connection\n");
  const cli::Table table({{"run", -18},
                          {"KV GB/s", 10, 3},
                          {"LF GB/s", 10, 3},
                          {"LF p50(ms)", 12, 3},
                          {"LF p99(ms)", 12, 3},
                          {"LF fresh", 10}});
  table.print_titles(stdout);
  Json json{{"rounds", options.rounds}, {"runs", Json::array()}};
  for (std::size_t i = 0; i < variants.size(); ++i) {
    Json run{{"name", kRunNames[i]},
             {"kv_gb_s", values_of(reports.by_variant[i], "kv", "gb_s")},
             {"lf_gb_s", values_of(reports.by_variant[i], "lf", "gb_s")},
             {"lf_latency_p50_ms", values_of(reports.by_variant[i], "lf", "latency_p50_ms")},
             {"lf_latency_p99_ms", values_of(reports.by_variant[i], "lf", "latency_p99_ms")},
             {"lf_fresh_connections", values_of(reports.by_variant[i], "lf", "fresh_connections")}};
    const auto middle_of = [&run](const char* what) { return ranks::median(run.at(what).get<std::vector<double>>()); };
    table.print_row(stdout, {kRunNames[i], middle_of("kv_gb_s"), middle_of("lf_gb_s"), middle_of("lf_latency_p50_ms"),
                             middle_of("lf_latency_p99_ms"), middle_of("lf_fresh_connections")});
    run["last_run"] = reports.by_variant[i].back();
    json["runs"].push_back(run);
  }
  const double tail =
      ranks::median_ratio(values_of(both, "lf", "latency_p99_ms"), values_of(alone, "lf", "latency_p99_ms"));
  const double rate = ranks::median_ratio(values_of(killed, "kv", "gb_s"), values_of(both, "kv", "gb_s"));
  std::printf("# LF's p99 with a busy KV, over that with an idle KV : %.2f (should be at most 3)\n", tail);
  std::printf("# KV's GB/s with LF killed, over that without       : %.2f (should be at least 0.95)\n", rate);
  json["lf_p99_ratio"] = tail;
  json["kv_rate_ratio"] = rate;

  std::vector<std::string> errors;
  for (std::size_t round = 0; round < both.size() && errors.empty(); ++round) {
    errors = differences(family_of(both[round], "kv"), family_of(killed[round], "kv"));
    if (family_of(killed[round], "lf").at("fresh_connections") == 0) errors.emplace_back("LF was not killed");
  }
  for (const std::string& error_text : errors) std::printf("# %s\n", error_text.c_str());
  json["errors"] = errors;
  if (!options.json.empty()) ranks::write_json(json, options.json);
  return errors.empty() ? reports.status : ExitStatus::kWrong;
}

}  // namespace verbatim::kv
