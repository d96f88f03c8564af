// Whether all ranks are about to do the same.
#pragma once

#include <string>
#include <vector>

#include "ranks/coordinator_connection.h"

namespace verbatim::ranks {

// Something that must be the same for all ranks.
struct Fact {
  std::string name;
  std::string value;
  std::string entries = {};  // what each entry is called, when the value is a list with commas: "row"
};

// Throws Failure naming the first rank that disagrees with rank 0, and about which of the facts, which come with plain
// causes first. Every rank, `rank` of them, must call it.
void agree(CoordinatorConnection& link, int rank, const std::vector<Fact>& facts);

}  // namespace verbatim::ranks
