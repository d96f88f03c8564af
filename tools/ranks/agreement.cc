#include "ranks/agreement.h"

#include <algorithm>
#include <cstddef>

namespace verbatim::ranks {
namespace {

// The index of the first entry in which two comma-separated lists differ.
std::size_t first_difference(const std::string& one, const std::string& other) {
  std::size_t entry = 0;
  for (std::size_t i = 0; i < std::min(one.size(), other.size()) && one[i] == other[i]; ++i) {
    if (one[i] == ',') ++entry;
  }
  return entry;
}

std::string entry_of(const std::string& list, std::size_t number) {
  std::size_t begin = 0;
  for (; number > 0 && begin != std::string::npos; --number) {
    begin = list.find(',', begin);
    if (begin != std::string::npos) ++begin;
  }
  return begin == std::string::npos ? "none" : list.substr(begin, list.find(',', begin) - begin);
}

// Describes the first difference between `facts` and `other`, the packed facts of another rank.
std::string difference(const std::vector<Fact>& facts, const std::vector<std::string>& other) {
  for (std::size_t i = 0; i < facts.size() && 2 * i + 1 < other.size(); ++i) {
    const auto& [name, value, entries] = facts[i];
    const std::string& other_name = other[2 * i];
    const std::string& other_value = other[2 * i + 1];
    const auto differ = [](const std::string& other_rank, const std::string& this_rank) {
      return std::string(": ").append(other_rank).append(" instead of ").append(this_rank);
    };
    if (name != other_name) return " about the " + name + differ(other_name, name);
    if (value == other_value) continue;
    if (entries.empty()) return " about the " + name + differ(other_value, value);
    const std::size_t entry = first_difference(other_value, value);
    return std::string(" about the ")
        .append(name)
        .append(", ")
        .append(entries)
        .append(" ")
        .append(std::to_string(entry))
        .append(differ(entry_of(other_value, entry), entry_of(value, entry)));
  }
  return {};
}

}  // namespace

void agree(CoordinatorConnection& coordinator, int rank, const std::vector<Fact>& facts) {
  std::vector<std::string> own;
  for (const Fact& fact : facts) own.insert(own.end(), {fact.name, fact.value});
  const std::vector<std::string> all = coordinator.all_gather(pack(own));
  for (std::size_t other = 1; other < all.size(); ++other) {
    if (all[other] == all.front()) continue;
    if (rank != 0) coordinator.barrier();  // rank 0 reports it and aborts the job, which ends this process
    throw Failure("rank " + std::to_string(other) + " disagrees with rank 0" + difference(facts, unpack(all[other])),
                  ExitStatus::kUsage);
  }
}

}  // namespace verbatim::ranks
