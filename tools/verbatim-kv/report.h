// What a run has shown: one row a family, printed as a table and written as JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "ranks/coordinator_connection.h"
#include "ranks/plugin_counters.h"
#include "verbatim-kv/options.h"
#include "verbatim-kv/stats.h"

namespace verbatim::kv {

// What must cross the network if nothing goes wrong.
struct Plan {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t requests = 0;  // as decode ranks count them: each one that shares a request counts for itself
};
Plan plan_of(const Geometry& geometry, const std::vector<Request>& requests);

// A rank's memory as the plugin knows it.
struct RankMemory {
  std::uint64_t bytes = 0;
  std::uint64_t allocations = 0;     // disjoint ones
  std::uint64_t registrations = 0;   // that the rank wants: one an allocation
  std::uint64_t reg_mr_calls = 0;    // more where the plugin's registrations are good for one comm only
  std::uint64_t damage = 0;          // bytes written outside
  std::string plugin_counters = {};  // compare_plugin_counters()'s answer
};

struct FamilyReport {
  Geometry geometry;
  std::uint64_t blocks[2] = {};  // of a prefill and of a decode rank
  Plan plan;
  FamilyStats stats;
};

struct Report {
  const Options& options;
  std::string transport = {};  // "Verbatim (net plugin v12, PATH)", "NCCL 2.28.3"
  std::size_t group = 1;
  std::uint64_t longest_blocks = 0;
  std::vector<FamilyReport> families = {};
  std::vector<RankMemory> ranks = {};

  // What this rank has counted, and what all others have: every rank calls it at the same time.
  void add_all_ranks(ranks::CoordinatorConnection& coordinator, const RankMemory& memory,
                     const ranks::PluginCounters& counters, const std::vector<const FamilyStats*>& stats);
  std::uint64_t wrong() const;
  bool counters_differ() const;  // the plugin's from ours, where nothing went wrong on the way
  ExitStatus status() const;
};

void print(std::FILE* out, const Report& report);
void write(const Report& report, const std::string& path);

}  // namespace verbatim::kv
