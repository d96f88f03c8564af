// Whether all ranks are about to do the same.
#pragma once

#include "ranks/coordinator_connection.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/options.h"

namespace verbatim::eplb {

// Throws Failure naming the first rank that disagrees with rank 0, and about what. Every rank must call it.
void agree(ranks::CoordinatorConnection& coordinator, const Options& options, const Input& input);

}  // namespace verbatim::eplb
