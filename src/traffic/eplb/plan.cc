#include "traffic/eplb/plan.h"

namespace verbatim::eplb {
namespace {

// For each expert the first row that holds it on each rank, in the order of ranks: `rows[begin[e]]` up to
// `rows[begin[e + 1]]`.
class Holders {
 public:
  Holders(const std::vector<int>& placement, const Workload& workload)
      : local_(workload.local_rows()), begin_(workload.experts + 1), rows_(placement.size()) {
    for (const int expert : placement) {
      if (expert != kEmptyRow) ++begin_[static_cast<std::size_t>(expert) + 1];
    }
    for (std::size_t e = 0; e < workload.experts; ++e) begin_[e + 1] += begin_[e];
    end_.assign(begin_.begin(), begin_.end() - 1);
    for (std::size_t row = 0; row < placement.size(); ++row) {
      if (placement[row] == kEmptyRow) continue;
      const auto e = static_cast<std::size_t>(placement[row]);
      if (end_[e] > begin_[e] && rank_of(rows_[end_[e] - 1]) == rank_of(row)) continue;
      rows_[end_[e]++] = row;
    }
  }

  std::size_t count(std::size_t expert) const { return end_[expert] - begin_[expert]; }
  std::size_t row(std::size_t expert, std::size_t index) const { return rows_[begin_[expert] + index]; }
  std::size_t rank(std::size_t expert, std::size_t index) const { return rank_of(row(expert, index)); }

 private:
  std::size_t rank_of(std::size_t row) const { return row / local_; }

  const std::size_t local_;
  std::vector<std::size_t> begin_;
  std::vector<std::size_t> end_;
  std::vector<std::size_t> rows_;
};

}  // namespace

std::vector<Transfer> plan_transfers(const Workload& workload, const Layer& layer) {
  const std::size_t local = workload.local_rows();
  const Holders before(layer.before, workload);
  const Holders after(layer.after, workload);
  std::vector<Transfer> transfers;
  transfers.reserve(workload.rows);
  std::vector<std::size_t> lacking;  // rows, one on each rank that needs the expert and does not hold it
  for (std::size_t e = 0; e < workload.experts; ++e) {
    lacking.clear();
    const std::size_t holders = before.count(e);
    std::size_t holder = 0;
    for (std::size_t i = 0; i < after.count(e); ++i) {
      while (holder < holders && before.rank(e, holder) < after.rank(e, i)) ++holder;
      if (holder == holders || before.rank(e, holder) != after.rank(e, i)) lacking.push_back(after.row(e, i));
    }
    if (lacking.empty()) continue;
    const std::size_t share = lacking.size() / holders;
    const auto serve = [&](std::size_t k, std::size_t row) {
      transfers.push_back({static_cast<std::uint32_t>(before.rank(e, k)), static_cast<std::uint32_t>(row / local),
                           static_cast<std::uint32_t>(e), static_cast<std::uint32_t>(before.row(e, k) % local),
                           static_cast<std::uint32_t>(row % local)});
    };
    for (std::size_t k = 0; k < holders; ++k) {
      for (std::size_t i = k * share; i < (k + 1) * share; ++i) serve(k, lacking[i]);
      if (const std::size_t rest = holders * share + k; rest < lacking.size()) serve(k, lacking[rest]);
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
    if ((of(transfer.source, transfer.expert) & kHolds) == 0) return what + ": not held there";
    if (of(transfer.destination, transfer.expert) != kNeeds) return what + ": not needed there, or a second time";
    of(transfer.destination, transfer.expert) |= kGets;
  }
  for (std::size_t rank = 0; rank < workload.ranks; ++rank) {
    for (std::size_t e = 0; e < workload.experts; ++e) {
      if (of(rank, e) != kNeeds) continue;
      return "layer " + std::to_string(layer.number) + ": nobody sends expert " + std::to_string(e) + " to rank " +
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
  std::vector<std::uint32_t> held(workload.experts, kNone);      // the first old row of each expert
  std::vector<std::uint32_t> received(workload.experts, kNone);  // the row that each is received into
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
