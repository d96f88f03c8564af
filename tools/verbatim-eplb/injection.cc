#include "verbatim-eplb/injection.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace verbatim::eplb {
namespace {

// The first two receives in one group that come from the same peer, each of a whole expert or of its first tensor.
std::pair<Call*, Call*> two_receives(std::vector<CallGroup>& groups, const LayerPlan& plan) {
  for (CallGroup& group : groups) {
    for (std::size_t i = 0; i < group.calls.size(); ++i) {
      Call& one = group.calls[i];
      if (one.sends || (one.tensor != 0 && one.tensor != kAllTensors)) continue;
      for (std::size_t j = i + 1; j < group.calls.size(); ++j) {
        Call& other = group.calls[j];
        if (other.sends || other.tensor != one.tensor || other.transfer == one.transfer) continue;
        if (plan.transfers[one.transfer].source == plan.transfers[other.transfer].source) return {&one, &other};
      }
    }
  }
  return {nullptr, nullptr};
}

bool has_place(const Options& options, const Input& input, const Layer& layer, const LayerPlan& plan,
               std::size_t rank) {
  const RankPlan own = plan_of_rank(input.workload, layer, plan.transfers, rank);
  switch (options.inject) {
    case Inject::kNothing:
    case Inject::kWriteGuard:
      return true;
    case Inject::kFlipByte:
      return options.mode == Mode::kPacked ? !own.sends.empty() : !own.receives.empty();
    case Inject::kDtypeOrder:
      return options.mode == Mode::kPacked && !own.receives.empty() && [&] {
        const std::vector<std::size_t> order = input.expert.by_type();
        return !std::is_sorted(order.begin(), order.end());
      }();
    case Inject::kWrongSlot:
      return std::any_of(own.sends.begin(), own.sends.end(), [&](std::uint32_t send) {
        const std::uint32_t row = plan.transfers[send].source_row;
        return send == own.sends.front() && other_row(input.workload, layer, rank, row) != row;
      });
    case Inject::kSwapReceives:
      return options.mode != Mode::kPut && own.receives.size() >= 2;  // a put has its destination from the sender
    case Inject::kDropDuplicate:
      return std::any_of(own.rows.begin(), own.rows.end(),
                         [](const RowFill& row) { return row.how == Fill::kDuplicate; });
    case Inject::kSwapOrder: {
      std::vector<CallGroup> groups = calls_of_rank(plan, own, input.expert, options.mode);
      return two_receives(groups, plan).first != nullptr;
    }
  }
  return false;
}

}  // namespace

Injection place_injection(const Options& options, const Input& input, const std::vector<LayerPlan>& plans) {
  if (options.inject == Inject::kNothing) return {};
  for (std::size_t layer = 0; layer < plans.size(); ++layer) {
    for (std::size_t rank = 0; rank < input.workload.ranks; ++rank) {
      if (has_place(options, input, input.workload.layers[layer], plans[layer], rank)) {
        return {options.inject, layer, rank};
      }
    }
  }
  throw BadInput("--inject: the error has no effect with this plan, expert and mode");
}

void swap_order(std::vector<CallGroup>& groups, const LayerPlan& plan) {
  const auto [one, other] = two_receives(groups, plan);
  if (one != nullptr) std::swap(*one, *other);
}

std::uint32_t other_row(const Workload& workload, const Layer& layer, std::size_t rank, std::uint32_t row) {
  const std::size_t local = workload.local_rows();
  for (std::size_t i = 1; i < local; ++i) {
    const std::size_t other = (row + i) % local;
    if (layer.before[rank * local + other] != layer.before[rank * local + row])
      return static_cast<std::uint32_t>(other);
  }
  return row;
}

}  // namespace verbatim::eplb
