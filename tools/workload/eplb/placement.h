// Which expert lies in which row before and after a rearrangement, layer by layer: made by a policy, or read.
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
  std::vector<int> before;  // expert by row, rank after rank; kEmptyRow: none
  std::vector<int> after;
};

struct Workload {
  std::size_t ranks;
  std::size_t experts;  // logical ones, numbered from 0
  std::size_t rows;     // of all ranks
  std::vector<Layer> layers;

  std::size_t local_rows() const { return rows / ranks; }
};

// Throws BadInput unless every layer has `rows` rows, each expert is in range, and every expert that is needed
// afterwards is held by a rank before.
void check(const Workload& workload);

enum class Policy : std::uint8_t {
  kIdentity,     // nothing moves
  kShuffle,      // two unrelated placements
  kRotate,       // every expert moves to the next rank
  kHot,          // all redundant rows become copies of one expert
  kGreedyDrift,  // balanced by load before and after the load has changed
  kScaleUp,      // from as few ranks as can hold all experts to all
  kScaleDown,    // the other way round
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
// The same for the same input on every host. Throws BadInput when ranks do not divide the rows, or a policy that
// changes the number of ranks finds too few rows.
Workload make_workload(const PolicyInput& input);
// The fewest redundant rows from `at_least` up with which the policy works on these ranks.
std::size_t needed_redundant(Policy policy, std::size_t ranks, std::size_t experts, std::size_t at_least);

}  // namespace verbatim::eplb
