// The plan in print, for other programs to read.
#pragma once

#include <cstdio>

#include "verbatim-eplb/options.h"

namespace verbatim::eplb {

// A line of JSON for each layer: old and new rows, transfers as [source, destination, expert, row there, row here,
// group], and what becomes of each row. Throws BadInput.
void print_plan(std::FILE* out, const Options& options);

}  // namespace verbatim::eplb
