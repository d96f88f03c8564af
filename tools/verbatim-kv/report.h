// The results of a run, one row per family, printed as a table and written as JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "ranks/coordinator_connection.h"
#include "ranks/json.h"
#include "verbatim-kv/options.h"
#include "verbatim-kv/stats.h"

namespace verbatim::kv {

// What must be transferred if nothing fails.
struct Plan {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t requests = 0;  // a request that several decode ranks share is counted for each of them
};
Plan plan_of(const Geometry& geometry, const std::vector<Request>& requests);

// A rank's memory and its registrations.
struct RankMemory {
  std::uint64_t bytes = 0;
  std::uint64_t allocations = 0;     // disjoint ranges
  std::uint64_t registrations = 0;   // needed by the rank: one per allocation
  std::uint64_t reg_mr_calls = 0;    // higher when the plugin's registrations are valid for one comm only
  std::uint64_t damage = 0;          // bytes written outside of the allocations
  std::string plugin_counters = {};  // result of compare_plugin_counters()
};

// The part of the time, on the rank where it is the largest, that checks took; from the counters of all ranks.
double check_percent(std::uint64_t check_ns, std::uint64_t elapsed_ns);
// From here on a rate says more about the checks than about the network.
constexpr double kMuchPercent = 50;

struct FamilyReport {
  Geometry geometry;
  std::uint64_t blocks[2] = {};  // of a prefill rank and of a decode rank
  Plan plan;
  FamilyStats stats;
};

struct Report {
  const Options& options;
  std::string memory_of_rank_0 = {};  // of rank 0: where it is and how it is registered
  std::string transport = {};         // for example "Verbatim (net plugin v12, PATH)" or "NCCL 2.28.3"
  std::size_t group = 1;
  std::uint64_t longest_blocks = 0;
  std::vector<FamilyReport> families = {};
  std::vector<RankMemory> ranks = {};
  ranks::Json bad_lists = ranks::Json::array();  // of a run over NIXL: what became of each invalid list

  // Adds the counters of all ranks. `counters`: what the plugin wrote (PluginCounters::text()). Every rank must call it
  // at the same time.
  void add_all_ranks(ranks::CoordinatorConnection& coordinator, const RankMemory& memory,
                     const std::optional<std::string>& counters, const std::vector<const FamilyStats*>& stats,
                     bool puts = false);
  std::uint64_t wrong() const;
  bool counters_differ() const;  // the plugin's counters from this tool's, in a run without failed connections
  // Adds the counters that a rank has sent. `json` is the list of the families' counters.
  void add_rank(const RankMemory& memory, const ranks::Json& json);
  ExitStatus status() const;
};

void print(std::FILE* out, const Report& report);
void write(const Report& report, const std::string& path);

}  // namespace verbatim::kv
