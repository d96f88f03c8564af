// One job in several variants, turn by turn, each run in processes of its own: what else the machine does comes to all
// of them alike, and the medians of several turns can be compared.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "ranks/failure.h"
#include "ranks/json.h"

namespace verbatim::ranks {

struct Variant {
  std::string name;                                                   // for who reads
  std::vector<std::string> arguments = {};                            // beside those of the command line
  std::vector<std::pair<std::string, std::string>> environment = {};  // beside what is there
};
// The plugin at `path`, by --plugin.
Variant over_plugin(const std::string& path);
// NCCL's network of that name: one of its own (IB, Socket), or a plugin's.
Variant over_network(const std::string& name);

// Options of the command line that the runs do not get.
struct ExcludedOptions {
  std::vector<std::string> options;  // each with a value
  std::vector<std::string> flags;
};

struct RoundReports {
  std::vector<std::vector<Json>> by_variant;  // each run's JSON report, in turns
  ExitStatus status = ExitStatus::kOk;        // the worst that is no failure
};

// Runs this program with the arguments `argv` once for each turn and variant; each run gets a --json of its own. Throws
// Failure, with what it printed, at the first run that fails or finds something wrong.
RoundReports run_rounds(const std::vector<Variant>& variants, int turns, const ExcludedOptions& excluded, int argc,
                        char** argv);

// What --compare asks for: one job over each network or plugin of the list "A,B,C". Throws Failure where there is
// nothing in it, and as run_turns does.
struct Comparison {
  std::vector<std::string> names;  // as the list has them
  std::vector<Variant> variants;
  RoundReports reports;
};
Comparison run_comparison(const std::string& list, Variant (*over)(const std::string&), std::size_t warmup, int turns,
                          int argc, char** argv);

// The figure at that place ("/layer_time_us/p50") of each report.
std::vector<double> values_at(const std::vector<Json>& reports, const std::string& place);

double median(std::vector<double> values);  // the lower of two; 0 of none
// The median of the ratios within one turn; a turn with nothing below does not count.
double median_ratio(const std::vector<double>& above, const std::vector<double>& below);

}  // namespace verbatim::ranks
