// What the measuring processes of `verbatim-perf qp-order` do, and the settings that they run with.
#pragma once

#include <string>
#include <vector>

#include "verbatim-perf/qp_order/options.h"

namespace verbatim::perf::qp_order {

constexpr const char* kPremisePart = "premise";

// In a child: measures `options.part` and writes `options.result`. Throws Failure.
ExitStatus measure(const QpOrderOptions& options);

}  // namespace verbatim::perf::qp_order
