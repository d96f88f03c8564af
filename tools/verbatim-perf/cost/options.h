// `verbatim-perf cost`: what a message costs the CPU, whatever plugin carries it.
#pragma once

#include <cstddef>
#include <string>
#include <variant>
#include <vector>

#include "verbatim-perf/options.h"

namespace verbatim::perf::cost {

struct CostOptions {
  std::vector<std::string> plugins;
  int api_version = 0;  // 0: the newest that the plugin has
  std::vector<std::size_t> sizes;
  std::vector<int> groups;  // members of a grouped receive; 1: single receives
  std::vector<int> qps;     // per connection
  int messages = 256;       // groups measured in a cell
  int connections = 1000;   // for memory and set-up; 0: not measured
  bool instructions = true;
  bool optional = false;  // receives alone are posted as those whose completion nobody waits for
  std::string json;
  bool verbose = false;

  std::string part;    // set in a child process: what it measures, of one plugin with one number of QPs
  std::string result;  // the file that it leaves
};

// `argv[0]` is "cost".
std::variant<CostOptions, EarlyExit> parse_cost_options(int argc, const char* const* argv);

// Measures and prints. Throws Failure.
ExitStatus run_cost(const CostOptions& options);

}  // namespace verbatim::perf::cost
