// Prints the plan as JSON, for other programs.
#pragma once

#include <cstdio>

#include "verbatim-eplb/options.h"

namespace verbatim::eplb {

// Prints a line of JSON for each layer: old and new rows, transfers as [source, destination, expert, source row,
// destination row, group], and how each row is filled. Throws BadInput.
void print_plan(std::FILE* out, const Options& options);

}  // namespace verbatim::eplb
