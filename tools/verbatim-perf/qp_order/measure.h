// The measurement that a child process of `verbatim-perf qp-order` makes.
#pragma once

#include <string>
#include <vector>

#include "verbatim-perf/qp_order/options.h"

namespace verbatim::perf::qp_order {

constexpr const char* kPremisePart = "premise";

// Measures `options.part` and writes the file `options.result`. Throws Failure.
ranks::ExitStatus measure(const QpOrderOptions& options);

}  // namespace verbatim::perf::qp_order
