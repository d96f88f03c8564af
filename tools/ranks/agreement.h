// Checks that all ranks run with the same settings.
#pragma once

#include <string>
#include <vector>

#include "ranks/coordinator_connection.h"

namespace verbatim::ranks {

// A setting that must be the same on all ranks.
struct Fact {
  std::string name;
  std::string value;
  std::string entries = {};  // for a value that is a comma-separated list: what one entry is called, for example "row"
};

// Throws Failure that names the first rank that differs from rank 0 and the first fact in which it differs. List the
// facts that cause other differences first. All ranks must call it; `rank` is the caller's.
void agree(CoordinatorConnection& coordinator, int rank, const std::vector<Fact>& facts);

}  // namespace verbatim::ranks
