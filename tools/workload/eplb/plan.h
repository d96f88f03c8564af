// The transfers of one layer's rearrangement (which rank sends which expert to which rank), and what each rank does
// with its rows. Every rank computes the whole plan from the same placement, so the ranks need not communicate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "workload/eplb/placement.h"

namespace verbatim::eplb {

// The move of one expert from one rank to another. Rows are numbered within the rank, from 0.
struct Transfer {
  std::uint32_t source;
  std::uint32_t destination;
  std::uint32_t expert;
  std::uint32_t source_row;       // the first row that holds the expert
  std::uint32_t destination_row;  // the first row that needs it; the others are copied from this row
};

// Transfers are sorted by expert, then by sender, then by receiver. The ranks that hold an expert, in ascending order,
// serve equal consecutive shares of the ranks that need it. The remainder goes to the first holders, one each. Time is
// linear in the number of rows. `workload` must have passed check().
std::vector<Transfer> plan_transfers(const Workload& workload, const Layer& layer);

// Returns nothing when each rank gets each expert that it needs and does not hold exactly once, from a rank that holds
// it. Otherwise returns what is wrong.
std::optional<std::string> self_check(const Workload& workload, const Layer& layer,
                                      const std::vector<Transfer>& transfers);

// How a row gets its new content.
enum class Fill : std::uint8_t {
  kKeep,       // it does not change, or is empty afterwards
  kCopy,       // from the same rank's old row `from`
  kReceive,    // from another rank
  kDuplicate,  // from the same rank's new row `from`, after that was received
};
struct RowFill {
  Fill how = Fill::kKeep;
  std::uint32_t from = 0;
};

// One rank's part of a plan. `sends` and `receives` are indices of transfers, in ascending order.
struct RankPlan {
  std::vector<std::uint32_t> sends;
  std::vector<std::uint32_t> receives;
  std::vector<std::uint32_t> packs;  // the first transfer of each expert in `sends`
  std::vector<RowFill> rows;
};
RankPlan plan_of_rank(const Workload& workload, const Layer& layer, const std::vector<Transfer>& transfers,
                      std::size_t rank);

}  // namespace verbatim::eplb
