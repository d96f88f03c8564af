// The cost of puts over a plugin's RMA table: starts the measuring processes and prints their results.
#pragma once

#include <optional>
#include <string>

#include "verbatim-perf/cost/cells.h"
#include "verbatim-perf/cost/options.h"

namespace verbatim::perf::cost {

// Empty, after a line that says so, for a plugin without an RMA table when messages are measured too. Throws Failure.
std::optional<Json> measure_put_cost(const CostOptions& options, const std::string& plugin);

void print_put_cost(const Json& measured);

}  // namespace verbatim::perf::cost
