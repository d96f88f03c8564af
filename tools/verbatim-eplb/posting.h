// The calls that one rank makes for one layer, with their order and groups, but without addresses. This allows the
// ranks to compare what both ends of each pair will post before they post it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ranks/coordinator_connection.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/options.h"
#include "workload/eplb/expert.h"
#include "workload/eplb/plan.h"
#include "workload/eplb/schedule.h"

namespace verbatim::eplb {

constexpr std::uint32_t kAllTensors = ~std::uint32_t{0};

struct Call {
  bool sends;
  std::uint32_t transfer;
  std::uint32_t tensor;  // kAllTensors: all tensors of the expert
};
struct CallGroup {
  std::uint32_t number;  // the same at both ends of a transfer
  std::vector<Call> calls;
};

// The plan of one layer, the same on all ranks.
struct LayerPlan {
  std::vector<Transfer> transfers;
  Schedule schedule;
};
LayerPlan plan_layer(const Workload& workload, const Layer& layer, const ExpertLayout& expert, const Options& options);
// The plans of all layers. Throws BadInput.
std::vector<LayerPlan> plan_layers(const Options& options, const Input& input);

// Groups in ascending order. In each group all sends come first, then all receives; experts are ascending, tensors in
// their order in the expert.
std::vector<CallGroup> calls_of_rank(const LayerPlan& layer, const RankPlan& plan, const ExpertLayout& expert,
                                     Mode mode);

// The calls of all layers that one rank would post, as lines of text for each direction and peer.
class DryRun {
 public:
  DryRun(std::size_t ranks, std::size_t rank);
  void add(std::size_t layer_number, const LayerPlan& layer, const std::vector<CallGroup>& groups,
           const ExpertLayout& expert);
  // Throws Failure that names the first pair of ranks whose calls differ, and the first difference. Every rank must
  // call it.
  void compare(ranks::CoordinatorConnection& coordinator) const;

 private:
  const std::size_t ranks_;
  const std::size_t rank_;
  std::vector<std::string> sends_;  // by peer
  std::vector<std::string> receives_;
};

}  // namespace verbatim::eplb
