// Checks that all ranks of verbatim-eplb run with the same settings and input.
#pragma once

#include "ranks/coordinator_connection.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/options.h"

namespace verbatim::eplb {

// Throws Failure that names the first rank that differs from rank 0 and in what. Every rank must call it.
void agree(ranks::CoordinatorConnection& coordinator, const Options& options, const Input& input);

}  // namespace verbatim::eplb
