// Assigns each transfer of a layer to a group of NCCL calls. Every rank computes the same schedule, so both ends of a
// transfer post it in the group of the same number. Groups run in the order of their numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "workload/eplb/plan.h"

namespace verbatim::eplb {

struct Schedule {
  std::vector<std::uint32_t> group_of;  // by transfer
  std::uint32_t groups = 0;
  std::size_t largest_group = 0;  // the most operations of one rank in one group
};

// A transfer needs `calls` operations at each end. No rank has more than `limit` operations in one group; 0 means no
// limit. Throws BadInput for a limit below `calls`. Time is linear in the number of transfers.
Schedule schedule_groups(const std::vector<Transfer>& transfers, std::size_t ranks, std::size_t calls,
                         std::size_t limit);
// The same, but each rank has at most one peer in each group. Pairs of ranks go first-fit into batches of disjoint
// pairs, and batches are cut into groups.
Schedule schedule_batches(const std::vector<Transfer>& transfers, std::size_t ranks, std::size_t calls,
                          std::size_t limit);

}  // namespace verbatim::eplb
