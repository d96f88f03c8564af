#include "verbatim-perf/cost/put_cost.h"

#include <cstdio>
#include <map>

#include "verbatim-perf/cost/measure.h"
#include "verbatim-perf/cost/part.h"

namespace verbatim::perf::cost {
namespace {

// The get has no completion: its request is what an empty test tests.
constexpr const char* kIncompleteGet = "SOFTVERBS_FAULTS=drop-completion op=read qp=any nth=1";

void add_instructions(const PartSubject& subject, Json& result) {
  const std::string dumps_prefix = (subject.scratch / "put-dump").string();
  const Json counted = run_part(subject, kPutInstructionsPart, {kIncompleteGet}, callgrind(dumps_prefix));
  const std::map<std::string, Instructions> dumps = read_dumps(dumps_prefix, counted["object"].get<std::string>());
  for (Json& cell : result["cells"]) {
    for (const std::string kind : kPutKinds) {
      const auto found = dumps.find(kind + " " + cell["bytes"].dump());
      if (found == dumps.end()) throw ranks::Failure("callgrind wrote no figures for '" + kind + "'");
      cell[kind]["instructions"] = json_of(found->second);
    }
  }
  if (const auto found = dumps.find(kTestIncomplete); found != dumps.end()) {
    result["instructions_test_incomplete"] = json_of(found->second);
  }
}

}  // namespace

std::optional<Json> measure_put_cost(const CostOptions& options, const std::string& plugin) {
  const ranks::Scratch scratch{"cost"};
  const PartSubject subject{options, plugin, scratch};
  const Json counted = run_part(subject, kPutsPart, {});
  if (counted.contains("error")) {
    const std::string why = counted["error"].get<std::string>();
    if (!options.messages_of_net) throw ranks::Failure(why + ". Next: leave --what out to measure messages only");
    std::printf("# puts are not measured: %s\n\n", why.c_str());
    return std::nullopt;
  }
  Json result{{"plugin", plugin},
              {"name", counted["name"]},
              {"api_version", counted["api_version"]},
              {"puts", put_count(options)},
              {"cells", Json::array()}};
  for (const Json& cell : counted["cells"]) {
    Json& added = result["cells"].emplace_back(Json{{"bytes", cell["bytes"]}});
    for (const std::string kind : kPutKinds) added[kind] = divided(cell[kind], put_count(options));
  }
  if (options.instructions) add_instructions(subject, result);
  return result;
}

void print_put_cost(const Json& measured) {
  std::printf(
      "# %s (RMA plugin v%d, %s); figures per put with its completion, also of the bursts of 8 puts to one peer\n",
      measured["name"].get<std::string>().c_str(), measured["api_version"].get<int>(),
      measured["plugin"].get<std::string>().c_str());
  std::printf("# %8s %10s %8s %7s %7s %9s %8s %6s %6s\n", "size(B)", "call", "plugin", "libc", "verbs", "post_send",
              "send_wr", "wc", "empty");
  for (const Json& cell : measured["cells"]) {
    for (const char* const kind : kPutKinds) {
      const Json& counts = cell[kind];
      std::printf("%10zu %10s", cell["bytes"].get<std::size_t>(), kind);
      if (counts.contains("instructions")) {
        const Json& all = counts["instructions"];
        std::printf(" %8.1f %7.1f %7.1f", number(all, "plugin"), number(all, "libc"), number(all, "verbs"));
      } else {
        std::printf(" %8s %7s %7s", "-", "-", "-");
      }
      std::printf(" %9.3f %8.3f %6.3f %6.3f\n", number(counts, "post_send"), number(counts, "send_requests"),
                  number(counts, "completions"), number(counts, "empty_polls"));
    }
  }
  if (measured.contains("instructions_test_incomplete")) {
    std::printf("# instructions of the plugin: a test without completion %.1f\n",
                number(measured["instructions_test_incomplete"], "plugin"));
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace verbatim::perf::cost
