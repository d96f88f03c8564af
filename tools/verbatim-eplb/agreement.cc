#include "verbatim-eplb/agreement.h"

#include <string>
#include <vector>

#include "ranks/agreement.h"

namespace verbatim::eplb {
namespace {

std::string list(const std::vector<int>& rows) {
  std::string text;
  for (const int row : rows) text += (text.empty() ? "" : ",") + std::to_string(row);
  return text;
}

// Everything that must be the same on all ranks. Facts that cause other differences come first.
std::vector<ranks::Fact> facts(const Options& options, const Input& input) {
  std::vector<ranks::Fact> facts{
      {"number of ranks", std::to_string(options.job.nranks)},
      {"mode", mode_name(options.mode)},
      {"schedule", schedule_name(options.peers)},
      {"transport", options.over == Over::kNccl ? "nccl" : "plugin"},
      {"memory", memory::kind_name(options.memory)},
      {"operations per group", std::to_string(options.ops_per_group)},
      {"iterations", std::to_string(options.total_iterations())},
      {"chunk bytes", std::to_string(options.chunk_bytes)},
      {"check", options.check ? "full" : "off"},
      {"injection", std::to_string(static_cast<int>(options.inject))},
      {"seed", std::to_string(options.seed)},
      {"number of experts", std::to_string(input.workload.experts)},
      {"number of rows", std::to_string(input.workload.rows)},
      {"number of tensors", std::to_string(input.expert.tensors.size())},
      {"number of layers", std::to_string(input.workload.layers.size())},
  };
  for (const Tensor& tensor : input.expert.tensors) {
    facts.push_back({"tensor " + tensor.name, tensor.type + " of " + std::to_string(tensor.bytes) + " bytes"});
  }
  for (const Layer& layer : input.workload.layers) {
    const std::string name = "layer " + std::to_string(layer.number);
    facts.push_back({name + ", old rows", list(layer.before), "row"});
    facts.push_back({name + ", new rows", list(layer.after), "row"});
  }
  return facts;
}

}  // namespace

void agree(ranks::CoordinatorConnection& coordinator, const Options& options, const Input& input) {
  ranks::agree(coordinator, options.job.rank, facts(options, input));
}

}  // namespace verbatim::eplb
