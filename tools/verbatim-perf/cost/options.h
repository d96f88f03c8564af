// The options of `verbatim-perf cost`, which measures the CPU cost of a message, or of a put, with any plugin.
#pragma once

#include <cstddef>
#include <string>
#include <variant>
#include <vector>

#include "verbatim-perf/options.h"

namespace verbatim::perf::cost {

struct CostOptions {
  std::vector<std::string> plugins;
  int api_version = 0;  // 0: the newest table that the plugin exports
  std::vector<std::size_t> sizes;
  std::vector<int> groups;      // members of a grouped receive; 1: single receives
  std::vector<int> qps;         // per connection, or per port of it
  std::size_t room = 0;         // bytes that a receive has more than its message
  int merge = 1;                // ports of a connection
  int messages = 256;           // groups measured in a cell
  int connections = 1000;       // for memory and set-up; 0: not measured
  bool messages_of_net = true;  // over the net table
  bool puts = true;             // over the RMA table, if the plugin has one
  bool instructions = true;
  bool optional = false;  // single receives have optional completion
  std::string json;
  bool plugin_log = false;

  std::string part;    // only in a measuring process: the part that it measures
  std::string result;  // only in a measuring process: the file that it writes
};

// `argv[0]` is "cost".
std::variant<CostOptions, EarlyExit> parse_cost_options(int argc, const char* const* argv);

// Measures and prints. Throws Failure.
ExitStatus run_cost(const CostOptions& options);

}  // namespace verbatim::perf::cost
