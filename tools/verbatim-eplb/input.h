// Makes the input of a run from the options: the expert layout, and placements from policies or a trace.
#pragma once

#include "verbatim-eplb/options.h"
#include "workload/eplb/expert.h"
#include "workload/eplb/placement.h"

namespace verbatim::eplb {

struct Input {
  ExpertLayout expert;
  Workload workload;
};
// Throws BadInput with one line that names the option, the layer or the row.
Input make_input(const Options& options);

}  // namespace verbatim::eplb
