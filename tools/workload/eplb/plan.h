// Who sends which expert to whom in one layer's rearrangement, and what each rank does with its rows. Every rank
// computes the whole plan from the same placement; nothing is said between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "workload/eplb/placement.h"

namespace verbatim::eplb {

// One expert from one rank to another. Rows are those of the rank itself, from 0.
struct Transfer {
  std::uint32_t source;
  std::uint32_t destination;
  std::uint32_t expert;
  std::uint32_t source_row;       // the first that holds it
  std::uint32_t destination_row;  // the first that needs it; others are filled from there
};

// Experts rise; those of one expert come sender by sender, and for each the receivers rise. The ranks that hold an
// expert, ascending, serve the ranks that need it in equal consecutive shares; what is left over goes to the first
// holders, one each. Linear in the number of rows. `workload` must have passed check().
std::vector<Transfer> plan_transfers(const Workload& workload, const Layer& layer);

// Nothing when each rank gets each expert that it needs and lacks exactly once, from one that holds it; else what is
// wrong.
std::optional<std::string> self_check(const Workload& workload, const Layer& layer,
                                      const std::vector<Transfer>& transfers);

// What becomes of a row.
enum class Fill : std::uint8_t {
  kKeep,       // nothing: empty afterwards, or unchanged
  kCopy,       // from the rank's own old row `from`
  kReceive,    // from another rank
  kDuplicate,  // from the new row `from`, once that was received
};
struct RowFill {
  Fill how = Fill::kKeep;
  std::uint32_t from = 0;
};

// One rank's part of a plan. Sends and receives are indices of transfers, rising.
struct RankPlan {
  std::vector<std::uint32_t> sends;
  std::vector<std::uint32_t> receives;
  std::vector<std::uint32_t> packs;  // of `sends`, the first of each expert
  std::vector<RowFill> rows;
};
RankPlan plan_of_rank(const Workload& workload, const Layer& layer, const std::vector<Transfer>& transfers,
                      std::size_t rank);

}  // namespace verbatim::eplb
