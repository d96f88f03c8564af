// The work of the measuring processes of `verbatim-perf cost`.
#pragma once

#include <string>

#include "verbatim-perf/cost/cells.h"
#include "verbatim-perf/cost/options.h"

namespace verbatim::perf::cost {

// In a measuring process: measures `options.part` of options.plugins[0] and writes `options.result`. Throws Failure.
ExitStatus measure(const CostOptions& options);

// The parts about puts. A plugin without an RMA table is an "error" in the result.
ExitStatus measure_puts(const CostOptions& options);
// How many puts a cell measures: options.messages in whole bursts.
int put_count(const CostOptions& options);

// The path of the object in which the table of a plugin is, as the dynamic loader reports it. Throws Failure.
std::string object_of(const void* table);
// Throws Failure.
void write_result(const CostOptions& options, const Json& result);

}  // namespace verbatim::perf::cost
