// What is done wrong on purpose, and where: the first place, in the order of layers and ranks, at which it shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "verbatim-eplb/input.h"
#include "verbatim-eplb/options.h"
#include "verbatim-eplb/posting.h"

namespace verbatim::eplb {

struct Injection {
  Inject kind = Inject::kNothing;
  std::size_t layer = 0;  // index
  std::size_t rank = 0;

  bool is(Inject wanted, std::size_t at_layer, std::size_t at_rank) const {
    return kind == wanted && layer == at_layer && rank == at_rank;
  }
};

// Throws BadInput when the plan has no place for it.
Injection place_injection(const Options& options, const Input& input, const std::vector<LayerPlan>& plans);

// The first two receives from one peer in one group, exchanged.
void swap_order(std::vector<CallGroup>& groups, const LayerPlan& plan);
// A row with another expert than `row` on this rank before, or `row` itself when there is none.
std::uint32_t other_row(const Workload& workload, const Layer& layer, std::size_t rank, std::uint32_t row);

}  // namespace verbatim::eplb
