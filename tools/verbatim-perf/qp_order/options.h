// `verbatim-perf qp-order`: the effect of the QP order on the device in use.
#pragma once

#include <cstddef>
#include <string>
#include <variant>
#include <vector>

#include "verbatim-perf/options.h"

namespace verbatim::perf::qp_order {

struct QpOrderOptions {
  std::string plugin;
  int api_version = 0;  // 0: the newest that the plugin has
  int ranks = 8;
  int flows = 4;                  // connections from each rank to each other rank
  int qps = 1;                    // of a connection
  std::size_t bytes = 128 << 10;  // of a message
  int rounds = 8;                 // of the test of the premise
  unsigned seed = 1;
  bool rotate = true;  // rank r requests rank r + 1 first, as NCCL does; else every rank requests rank 0 first
  std::vector<std::string> orders;
  std::string json;
  bool plugin_log = false;

  std::string part;    // set in a child process: "premise" or an order
  std::string result;  // the file that the child process writes
};

// `argv[0]` is "qp-order".
std::variant<QpOrderOptions, cli::EarlyExit> parse_qp_order_options(int argc, const char* const* argv);

// Measures and prints. Throws Failure.
ranks::ExitStatus run_qp_order(const QpOrderOptions& options);

}  // namespace verbatim::perf::qp_order
