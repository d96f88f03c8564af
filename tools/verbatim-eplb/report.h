// The results of a run, and their output formats: a table on stdout and JSON in a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "ranks/json.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/options.h"
#include "verbatim-eplb/posting.h"

namespace verbatim::eplb {

struct LayerRow {
  std::size_t layer = 0;
  std::size_t experts = 0;       // number of transfers
  std::uint64_t bytes = 0;       // of all transfers
  std::uint64_t most_bytes = 0;  // received by the rank that receives most
  std::size_t packs = 0;
  std::size_t groups = 0;
  std::size_t largest_group = 0;
  std::vector<double> times_us = {};  // of the slowest rank, by iteration
  std::uint64_t wrong = 0;            // bytes, over all iterations
};

// The row of a layer before anything was moved.
LayerRow planned_layer(const Options& options, const Input& input, std::size_t index, const LayerPlan& plan);

// What every rank sends to rank 0 at the end.
struct RankSummary {
  std::vector<std::uint64_t> sent;      // to each rank, over all iterations
  std::vector<std::uint64_t> received;  // from each rank
  std::uint64_t operations = 0;
  std::uint64_t messages = 0;
  std::uint64_t grouped_receives = 0;
  std::uint64_t packs = 0;
  double planning_ms = 0;
  double moving_ms = 0;           // all layers of all iterations, also of the warm-up
  double checking_ms = 0;         // filling and comparing bytes before and after them
  std::size_t weights_bytes = 0;  // as allocated, without guards
  std::size_t send_bytes = 0;
  std::size_t recv_bytes = 0;
  std::size_t new_rows_bytes = 0;
  std::size_t allocated_bytes = 0;  // by this tool, with guards
  std::size_t in_use_bytes = 0;     // increase of Memory::in_use() during the run
  std::string wrong_signals;        // of Transport::wrong_signals()
  std::string stats;                // of compare_stats(): "equal", "absent", or the difference
};
ranks::Json json_of(const RankSummary& summary);
RankSummary summary_of(const ranks::Json& json);

struct Process {
  std::string host;
  int pid;
};

struct Report {
  const Options& options;
  const Input& input;
  ranks::Json transport = {};
  std::vector<Process> processes = {};  // by rank
  std::vector<LayerRow> layers = {};
  std::vector<RankSummary> by_rank = {};
  std::uint64_t wrong_bytes = 0;
  std::string first_wrong = {};
  std::vector<std::string> errors = {};  // counts that differ from the plan
};

// Jain's index of fairness: 1 when all values are equal, 1/n when only one is not 0.
double jain(const std::vector<std::uint64_t>& values);

void print_head(std::FILE* out, const Report& report);
void print_table(std::FILE* out, const Report& report);
void write_report(const Report& report, const std::string& path);

}  // namespace verbatim::eplb
