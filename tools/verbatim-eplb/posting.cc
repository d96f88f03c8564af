#include "verbatim-eplb/posting.h"

#include <algorithm>

#include "ranks/failure.h"

namespace verbatim::eplb {
namespace {

using ranks::ExitStatus;
using ranks::Failure;

// FNV-1a
std::uint64_t digest(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::string first_line_from(const std::string& text, std::size_t at) {
  return at >= text.size() ? "nothing" : text.substr(at, text.find('\n', at) - at);
}

// The start of the first line in which two texts differ.
std::size_t first_difference(const std::string& one, const std::string& other) {
  const auto end = std::min(one.size(), other.size());
  std::size_t at = 0;
  while (at < end && one[at] == other[at]) ++at;
  while (at > 0 && one[at - 1] != '\n') --at;
  return at;
}

}  // namespace

LayerPlan plan_layer(const Workload& workload, const Layer& layer, const ExpertLayout& expert, const Options& options) {
  LayerPlan plan{plan_transfers(workload, layer), {}};
  const bool one_call = options.mode != Mode::kPerTensor;
  const std::size_t calls = one_call ? 1 : expert.tensors.size();
  plan.schedule = options.peers == PeersAtATime::kOne
                      ? schedule_batches(plan.transfers, workload.ranks, calls, options.ops_per_group)
                      : schedule_groups(plan.transfers, workload.ranks, calls, options.ops_per_group);
  return plan;
}

std::vector<LayerPlan> plan_layers(const Options& options, const Input& input) {
  std::vector<LayerPlan> plans;
  for (const Layer& layer : input.workload.layers) {
    plans.push_back(plan_layer(input.workload, layer, input.expert, options));
  }
  return plans;
}

std::vector<CallGroup> calls_of_rank(const LayerPlan& layer, const RankPlan& plan, const ExpertLayout& expert,
                                     Mode mode) {
  std::vector<CallGroup> groups;
  std::vector<std::uint32_t> index(layer.schedule.groups, ~std::uint32_t{0});
  const auto mark = [&](const std::vector<std::uint32_t>& transfers) {
    for (const std::uint32_t transfer : transfers) index[layer.schedule.group_of[transfer]] = 0;
  };
  mark(plan.sends);
  mark(plan.receives);
  for (std::uint32_t number = 0; number < index.size(); ++number) {
    if (index[number] != 0) continue;
    index[number] = static_cast<std::uint32_t>(groups.size());
    groups.push_back({number, {}});
  }
  const auto add = [&](const std::vector<std::uint32_t>& transfers, bool sends) {
    for (const std::uint32_t transfer : transfers) {
      std::vector<Call>& calls = groups[index[layer.schedule.group_of[transfer]]].calls;
      if (mode != Mode::kPerTensor) {
        calls.push_back({sends, transfer, kAllTensors});
        continue;
      }
      for (std::uint32_t tensor = 0; tensor < expert.tensors.size(); ++tensor) {
        calls.push_back({sends, transfer, tensor});
      }
    }
  };
  add(plan.sends, true);
  add(plan.receives, false);
  return groups;
}

DryRun::DryRun(std::size_t ranks, std::size_t rank) : ranks_(ranks), rank_(rank), sends_(ranks), receives_(ranks) {}

void DryRun::add(std::size_t layer_number, const LayerPlan& layer, const std::vector<CallGroup>& groups,
                 const ExpertLayout& expert) {
  for (const CallGroup& group : groups) {
    for (const Call& call : group.calls) {
      const Transfer& transfer = layer.transfers[call.transfer];
      std::string& list = call.sends ? sends_[transfer.destination] : receives_[transfer.source];
      list += "layer " + std::to_string(layer_number) + ", group " + std::to_string(group.number) + ", expert " +
              std::to_string(transfer.expert);
      if (call.tensor == kAllTensors) {
        list +=
            ", " + std::to_string(expert.bytes()) + " bytes in " + std::to_string(expert.tensors.size()) + " tensors";
      } else {
        const Tensor& tensor = expert.tensors[call.tensor];
        list += ", tensor " + tensor.name + ", " + std::to_string(tensor.bytes) + " bytes";
      }
      list += '\n';
    }
  }
}

void DryRun::compare(ranks::CoordinatorConnection& coordinator) const {
  std::vector<std::string> digests;
  for (const auto* lists : {&sends_, &receives_}) {
    for (const std::string& list : *lists) digests.push_back(ranks::to_bytes(digest(list)));
  }
  std::vector<std::vector<std::string>> all;
  for (const std::string& packed : coordinator.all_gather(ranks::pack(digests))) all.push_back(ranks::unpack(packed));
  for (std::size_t source = 0; source < ranks_; ++source) {
    for (std::size_t destination = 0; destination < ranks_; ++destination) {
      if (all[source].size() != 2 * ranks_ || all[destination].size() != 2 * ranks_) {
        throw Failure("the ranks have different numbers of ranks", ExitStatus::kUsage);
      }
      if (all[source][destination] == all[destination][ranks_ + source]) continue;
      // All ranks see the same digests, so all of them take part in the second exchange.
      const auto lists = coordinator.all_gather(rank_ == source        ? sends_[destination]
                                                : rank_ == destination ? receives_[source]
                                                                       : std::string());
      if (rank_ != 0) coordinator.barrier();  // rank 0 reports it and aborts the job, which ends this process
      const std::size_t at = first_difference(lists[source], lists[destination]);
      throw Failure("ranks " + std::to_string(source) + " and " + std::to_string(destination) +
                        " do not post in the same order: the sender posts " + first_line_from(lists[source], at) +
                        "; the receiver posts " + first_line_from(lists[destination], at),
                    ExitStatus::kUsage);
    }
  }
}

}  // namespace verbatim::eplb
