#include "verbatim-kv/nixl_run.h"

#include <vector>

#include "nixl/run.h"
#include "verbatim-kv/layout.h"
#include "verbatim-kv/nixl_plan.h"
#include "verbatim-kv/report.h"

namespace verbatim::kv {

ExitStatus run_over_nixl(const Options& options) {
  const std::vector<Request> requests = make_requests(options);
  Layout layout = lay_out(options, requests, true);
  const ranks::Json result = nixl::run(options.python, "nixl_kv", nixl_plan(options, requests, layout));
  Report report{.options = options};
  report.memory_of_rank_0 = memory::describe_host_memory(options.pages) + ", registered by NIXL";
  report.transport = result.at("over").get<std::string>() + " (UCX backend)";
  report.families = std::move(layout.reports);
  report.longest_blocks = layout.longest_blocks;
  for (const ranks::Json& rank : result.at("ranks")) {
    const std::uint64_t allocations = rank.at("allocations");
    report.add_rank({.bytes = rank.at("bytes"),
                     .allocations = allocations,
                     .registrations = allocations,
                     .reg_mr_calls = allocations,
                     .damage = rank.at("damage"),
                     .plugin_counters = "absent"},
                    rank.at("families"));
    for (const ranks::Json& bad : rank.at("bad_lists")) report.bad_lists.push_back(bad);
  }
  print(stdout, report);
  if (!options.json.empty()) write(report, options.json);
  return report.status();
}

}  // namespace verbatim::kv
