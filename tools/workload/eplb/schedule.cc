#include "workload/eplb/schedule.h"

#include <algorithm>
#include <string>

namespace verbatim::eplb {
namespace {

// How many transfers of one rank fit into a group.
std::size_t transfers_in_group(std::size_t calls, std::size_t limit) {
  if (limit == 0) return ~std::size_t{0};
  if (limit < calls) {
    throw BadInput("a group of " + std::to_string(limit) + " operations cannot hold the " + std::to_string(calls) +
                   " operations of one expert");
  }
  return limit / calls;
}

void count_operations(Schedule& schedule, const std::vector<Transfer>& transfers, std::size_t ranks,
                      std::size_t calls) {
  std::vector<std::size_t> operations(static_cast<std::size_t>(schedule.groups) * ranks);
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    for (const std::uint32_t rank : {transfers[i].source, transfers[i].destination}) {
      std::size_t& count = operations[schedule.group_of[i] * ranks + rank];
      count += calls;
      schedule.largest_group = std::max(schedule.largest_group, count);
    }
  }
}

}  // namespace

Schedule schedule_groups(const std::vector<Transfer>& transfers, std::size_t ranks, std::size_t calls,
                         std::size_t limit) {
  const std::size_t capacity = transfers_in_group(calls, limit);
  struct Current {
    std::uint32_t group = 0;
    std::size_t used = 0;
  };
  std::vector<Current> current(ranks);
  Schedule schedule;
  schedule.group_of.reserve(transfers.size());
  for (const Transfer& transfer : transfers) {
    Current& source = current[transfer.source];
    Current& destination = current[transfer.destination];
    // The group numbers of a rank never fall, so the transfers of a pair of ranks keep their order.
    const auto next_of = [capacity](const Current& of) { return of.used < capacity ? of.group : of.group + 1; };
    const std::uint32_t group = std::max(next_of(source), next_of(destination));
    for (Current* const end : {&source, &destination}) {
      if (end->group != group) *end = {group, 0};
      ++end->used;
    }
    schedule.group_of.push_back(group);
    schedule.groups = std::max(schedule.groups, group + 1);
  }
  count_operations(schedule, transfers, ranks, calls);
  return schedule;
}

Schedule schedule_batches(const std::vector<Transfer>& transfers, std::size_t ranks, std::size_t calls,
                          std::size_t limit) {
  const std::size_t capacity = transfers_in_group(calls, limit);
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::vector<std::uint32_t> batch_of_pair(ranks * ranks, kNone);
  std::vector<std::size_t> size_of_pair(ranks * ranks);
  std::vector<std::vector<bool>> busy;  // by batch and rank
  std::vector<std::size_t> largest;     // by batch: the most transfers of one pair
  for (const Transfer& transfer : transfers) {
    const std::size_t pair = transfer.source * ranks + transfer.destination;
    if (batch_of_pair[pair] == kNone) {
      std::uint32_t batch = 0;
      while (batch < busy.size() && (busy[batch][transfer.source] || busy[batch][transfer.destination])) ++batch;
      if (batch == busy.size()) {
        busy.emplace_back(ranks);
        largest.push_back(0);
      }
      busy[batch][transfer.source] = busy[batch][transfer.destination] = true;
      batch_of_pair[pair] = batch;
    }
    largest[batch_of_pair[pair]] = std::max(largest[batch_of_pair[pair]], ++size_of_pair[pair]);
  }
  std::vector<std::uint32_t> first_group;
  Schedule schedule;
  for (const std::size_t size : largest) {
    first_group.push_back(schedule.groups);
    schedule.groups += static_cast<std::uint32_t>((size - 1) / capacity + 1);
  }
  std::fill(size_of_pair.begin(), size_of_pair.end(), std::size_t{0});
  for (const Transfer& transfer : transfers) {
    const std::size_t pair = transfer.source * ranks + transfer.destination;
    schedule.group_of.push_back(first_group[batch_of_pair[pair]] +
                                static_cast<std::uint32_t>(size_of_pair[pair]++ / capacity));
  }
  count_operations(schedule, transfers, ranks, calls);
  return schedule;
}

}  // namespace verbatim::eplb
