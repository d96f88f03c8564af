#include "workload/eplb/plan.h"

#include <span>

namespace verbatim::eplb {
namespace {

// For each expert, the first row that holds it on each rank, in the order of ranks: rows_[begin_[e]] up to
// rows_[end_[e]]. Each entry stores its rank, because a division for each look-up would be most of the work.
class Holders {
 public:
  Holders(const std::vector<int>& placement, const Workload& workload)
      : begin_(workload.experts + 1), rows_(placement.size()) {
    for (const int expert : placement) {
      if (expert != kEmptyRow) ++begin_[static_cast<std::size_t>(expert) + 1];
    }
    for (std::size_t e = 0; e < workload.experts; ++e) begin_[e + 1] += begin_[e];
    end_.assign(begin_.begin(), begin_.end() - 1);
    const auto local = static_cast<std::uint32_t>(workload.local_rows());
    const auto ranks = static_cast<std::uint32_t>(workload.ranks);
    const int* expert = placement.data();
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      for (std::uint32_t row = 0; row < local; ++row, ++expert) {
        if (*expert == kEmptyRow) continue;
        const auto e = static_cast<std::size_t>(*expert);
        if (end_[e] > begin_[e] && rows_[end_[e] - 1].rank == rank) continue;
        rows_[end_[e]++] = {rank, row};
      }
    }
  }

  struct Row {
    std::uint32_t rank;
    std::uint32_t row;  // number within the rank
  };
  std::span<const Row> of(std::size_t expert) const {
    return {rows_.data() + begin_[expert], end_[expert] - begin_[expert]};
  }

 private:
  std::vector<std::uint32_t> begin_;
  std::vector<std::uint32_t> end_;
  std::vector<Row> rows_;
};

}  // namespace

std::vector<Transfer> plan_transfers(const Workload& workload, const Layer& layer) {
  const Holders before(layer.before, workload);
  const Holders after(layer.after, workload);
  std::vector<Transfer> transfers;
  transfers.reserve(workload.rows);
  std::vector<Holders::Row> lacking;  // the first row on each rank that needs the expert and does not hold it
  for (std::size_t e = 0; e < workload.experts; ++e) {
    lacking.clear();
    const std::span<const Holders::Row> holders = before.of(e);
    std::size_t holder = 0;
    for (const Holders::Row& wanted : after.of(e)) {
      while (holder < holders.size() && holders[holder].rank < wanted.rank) ++holder;
      if (holder == holders.size() || holders[holder].rank != wanted.rank) lacking.push_back(wanted);
    }
    if (lacking.empty()) continue;
    const std::size_t share = lacking.size() / holders.size();
    for (std::size_t k = 0; k < holders.size(); ++k) {
      const auto serve = [&](const Holders::Row& to) {
        transfers.push_back({holders[k].rank, to.rank, static_cast<std::uint32_t>(e), holders[k].row, to.row});
      };
      for (std::size_t i = k * share; i < (k + 1) * share; ++i) serve(lacking[i]);
      if (const std::size_t rest = holders.size() * share + k; rest < lacking.size()) serve(lacking[rest]);
    }
  }
  return transfers;
}

std::optional<std::string> self_check(const Workload& workload, const Layer& layer,
                                      const std::vector<Transfer>& transfers) {
  const std::size_t local = workload.local_rows();
  enum : std::uint8_t { kHolds = 1, kNeeds = 2, kGets = 4 };
  std::vector<std::uint8_t> state(workload.ranks * workload.experts);
  const auto of = [&](std::size_t rank, std::size_t expert) -> std::uint8_t& {
    return state[rank * workload.experts + expert];
  };
  const auto mark = [&](const std::vector<int>& rows, std::uint8_t bit) {
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (rows[row] != kEmptyRow) of(row / local, static_cast<std::size_t>(rows[row])) |= bit;
    }
  };
  mark(layer.before, kHolds);
  mark(layer.after, kNeeds);
  for (const Transfer& transfer : transfers) {
    const std::string what = "layer " + std::to_string(layer.number) + ", expert " + std::to_string(transfer.expert) +
                             " from rank " + std::to_string(transfer.source) + " to " +
                             std::to_string(transfer.destination);
    if ((of(transfer.source, transfer.expert) & kHolds) == 0) return what + ": the source does not hold it";
    if (of(transfer.destination, transfer.expert) != kNeeds)
      return what + ": the destination does not need it, or gets it twice";
    of(transfer.destination, transfer.expert) |= kGets;
  }
  for (std::size_t rank = 0; rank < workload.ranks; ++rank) {
    for (std::size_t e = 0; e < workload.experts; ++e) {
      if (of(rank, e) != kNeeds) continue;
      return "layer " + std::to_string(layer.number) + ": no rank sends expert " + std::to_string(e) + " to rank " +
             std::to_string(rank);
    }
  }
  return std::nullopt;
}

RankPlan plan_of_rank(const Workload& workload, const Layer& layer, const std::vector<Transfer>& transfers,
                      std::size_t rank) {
  const std::size_t local = workload.local_rows();
  const std::size_t first = rank * local;
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::vector<std::uint32_t> held(workload.experts, kNone);      // by expert: the first old row of this rank
  std::vector<std::uint32_t> received(workload.experts, kNone);  // by expert: the row that it is received into
  for (std::size_t row = local; row-- > 0;) {
    if (layer.before[first + row] != kEmptyRow) {
      held[static_cast<std::size_t>(layer.before[first + row])] = static_cast<std::uint32_t>(row);
    }
  }
  RankPlan plan;
  for (std::uint32_t i = 0; i < transfers.size(); ++i) {
    const Transfer& transfer = transfers[i];
    if (transfer.source == rank) {
      if (plan.sends.empty() || transfers[plan.sends.back()].expert != transfer.expert) plan.packs.push_back(i);
      plan.sends.push_back(i);
    }
    if (transfer.destination == rank) {
      plan.receives.push_back(i);
      received[transfer.expert] = transfer.destination_row;
    }
  }
  plan.rows.resize(local);
  for (std::size_t row = 0; row < local; ++row) {
    const int wanted = layer.after[first + row];
    if (wanted == kEmptyRow || wanted == layer.before[first + row]) continue;
    const auto expert = static_cast<std::size_t>(wanted);
    if (held[expert] != kNone) {
      plan.rows[row] = {Fill::kCopy, held[expert]};
    } else if (received[expert] == row) {
      plan.rows[row] = {Fill::kReceive, 0};
    } else {
      plan.rows[row] = {Fill::kDuplicate, received[expert]};
    }
  }
  return plan;
}

}  // namespace verbatim::eplb
