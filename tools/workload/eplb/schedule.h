// In which group of NCCL calls each transfer of a layer goes. Every rank computes the same, so that both ends of a
// transfer have it in the group of the same number, and groups run in the order of their numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "workload/eplb/plan.h"

namespace verbatim::eplb {

struct Schedule {
  std::vector<std::uint32_t> group_of;  // by transfer
  std::uint32_t groups = 0;
  std::size_t largest_group = 0;  // operations that any rank has in one group
};

// A transfer is `calls` operations at each end. No rank has more than `limit` in one group, 0: no limit; a limit below
// `calls` is a BadInput. Linear.
Schedule schedule_groups(const std::vector<Transfer>& transfers, std::size_t ranks, std::size_t calls,
                         std::size_t limit);
// The same with at most one peer a rank in each group: directed pairs go first-fit into batches of disjoint pairs, and
// batches are cut into groups.
Schedule schedule_batches(const std::vector<Transfer>& transfers, std::size_t ranks, std::size_t calls,
                          std::size_t limit);

}  // namespace verbatim::eplb
