// From options to what moves: the expert, and the placements that a policy makes or a trace holds.
#pragma once

#include "verbatim-eplb/options.h"
#include "workload/eplb/expert.h"
#include "workload/eplb/placement.h"

namespace verbatim::eplb {

struct Input {
  ExpertLayout expert;
  Workload workload;
};
// Throws BadInput with one line that names the place.
Input make_input(const Options& options);

}  // namespace verbatim::eplb
