// Which expert is in which row before and after a rearrangement, for each layer. A placement is made by a policy or
// read from a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "workload/eplb/expert.h"

namespace verbatim::eplb {

constexpr int kEmptyRow = -1;

struct Layer {
  std::size_t number;
  std::vector<int> before;  // expert in each row, rank after rank; kEmptyRow: none
  std::vector<int> after;
};

struct Workload {
  std::size_t ranks;
  std::size_t experts;  // logical experts, numbered from 0
  std::size_t rows;     // of all ranks together
  std::vector<Layer> layers;

  std::size_t local_rows() const { return rows / ranks; }
};

// Throws BadInput unless the ranks divide the rows, every layer has `rows` rows, each expert is in range, and each
// expert of the new placement is also in the old one.
void check(const Workload& workload);

enum class Policy : std::uint8_t {
  kIdentity,     // nothing moves
  kShuffle,      // two unrelated placements
  kRotate,       // every expert moves to the next rank
  kHot,          // all redundant rows hold copies of the same expert
  kGreedyDrift,  // balanced by load, before and after a change of the load
  kScaleUp,      // from the fewest ranks that can hold all experts to all ranks
  kScaleDown,    // from all ranks to the fewest
};
const std::vector<std::pair<std::string, Policy>>& policies();

struct PolicyInput {
  Policy policy;
  std::size_t ranks;
  std::size_t experts;
  std::size_t redundant;
  std::size_t layers;
  std::uint64_t seed;
};
// Gives the same result for the same input on every machine. Throws BadInput when the ranks do not divide the rows, or
// when a policy that changes the number of ranks has too few rows.
Workload make_workload(const PolicyInput& input);
// The smallest number of redundant rows, not below `at_least`, with which the policy works on these ranks.
std::size_t needed_redundant(Policy policy, std::size_t ranks, std::size_t experts, std::size_t at_least);

}  // namespace verbatim::eplb
