// The calls that one rank makes for one layer, in their order and groups, before any address is known: so that what two
// ranks will say to each other can be compared before they do.
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
  std::uint32_t tensor;  // kAllTensors: the whole expert
};
struct CallGroup {
  std::uint32_t number;  // the same at both ends
  std::vector<Call> calls;
};

// A layer as all ranks see it.
struct LayerPlan {
  std::vector<Transfer> transfers;
  Schedule schedule;
};
LayerPlan plan_layer(const Workload& workload, const Layer& layer, const ExpertLayout& expert, const Options& options);
// Those of all layers. Throws BadInput.
std::vector<LayerPlan> plan_layers(const Options& options, const Input& input);

// Groups rise; in each all sends come first, then all receives, experts ascending, tensors in their order.
std::vector<CallGroup> calls_of_rank(const LayerPlan& layer, const RankPlan& plan, const ExpertLayout& expert,
                                     Mode mode);

// What one rank would post towards each other one, of all layers, as lines of text by direction and peer.
class DryRun {
 public:
  DryRun(std::size_t ranks, std::size_t rank);
  void add(std::size_t layer_number, const LayerPlan& layer, const std::vector<CallGroup>& groups,
           const ExpertLayout& expert);
  // Throws Failure naming the first pair whose ends differ, and where. Every rank must call it.
  void compare(ranks::CoordinatorConnection& coordinator) const;

 private:
  const std::size_t ranks_;
  const std::size_t rank_;
  std::vector<std::string> sends_;  // by peer
  std::vector<std::string> receives_;
};

}  // namespace verbatim::eplb
