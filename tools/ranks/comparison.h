// Runs one job in several variants, round by round, each run in its own processes. The load of the machine then affects
// all variants alike, and the medians of several rounds can be compared.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "ranks/failure.h"
#include "ranks/json.h"

namespace verbatim::ranks {

struct Variant {
  std::string name;                                                   // for messages and tables
  std::vector<std::string> arguments = {};                            // in addition to the command line's
  std::vector<std::pair<std::string, std::string>> environment = {};  // in addition to this process's
};
// Runs with the plugin at `path` (--plugin).
Variant over_plugin(const std::string& path);
// Runs with the NCCL network `name`: NCCL's own (IB, Socket) or a plugin's.
Variant over_network(const std::string& name);

// Options of the command line that are not passed to the runs.
struct ExcludedOptions {
  std::vector<std::string> options;  // options with a value
  std::vector<std::string> flags;
};

struct RoundReports {
  std::vector<std::vector<Json>> by_variant;  // the JSON reports of each variant, one per round
  ExitStatus status = ExitStatus::kOk;        // the highest exit status of a run that did not fail
};

// Runs this program with the arguments `argv` once for each round and variant; each run has its own --json file. Throws
// Failure, with the run's output, at the first run that fails or finds wrong data.
RoundReports run_rounds(const std::vector<Variant>& variants, int rounds, const ExcludedOptions& excluded, int argc,
                        char** argv);

// Implements --compare: one job over each network or plugin of the list "A,B,C". Throws Failure for an empty list and
// as run_rounds does.
struct Comparison {
  std::vector<std::string> names;  // in the order of the list
  std::vector<Variant> variants;
  RoundReports reports;
};
Comparison run_comparison(const std::string& list, Variant (*over)(const std::string&), std::size_t warmup, int rounds,
                          int argc, char** argv);

// The value at `pointer` (for example "/layer_time_us/p50") in each report.
std::vector<double> values_at(const std::vector<Json>& reports, const std::string& pointer);

double median(std::vector<double> values);  // the lower median; 0 for an empty list
// The median of the ratios within one round. Rounds with a zero denominator are not counted.
double median_ratio(const std::vector<double>& above, const std::vector<double>& below);

}  // namespace verbatim::ranks
