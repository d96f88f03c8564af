// The error that --inject introduces, and the first place, in the order of layers and ranks, where it has an effect.
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

// Throws BadInput when the plan has no place where the error has an effect.
Injection place_injection(const Options& options, const Input& input, const std::vector<LayerPlan>& plans);

// Exchanges the first two receives that come from the same peer in one group.
void swap_order(std::vector<CallGroup>& groups, const LayerPlan& plan);
// A row of this rank that held another expert than `row` before, or `row` itself when there is none.
std::uint32_t other_row(const Workload& workload, const Layer& layer, std::size_t rank, std::uint32_t row);

}  // namespace verbatim::eplb
