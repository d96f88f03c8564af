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
      {"mode (--mode)", mode_name(options.mode)},
      {"schedule (--schedule)", schedule_name(options.peers)},
      {"transport (--over)", options.over == Over::kNccl ? "nccl" : "plugin"},
      {"memory (--memory)", memory::kind_name(options.memory)},
      {"pages (--pages)", memory::pages_name(options.pages)},
      {"operations per group (--ops-per-group)", std::to_string(options.ops_per_group)},
      {"iterations (--iters, --warmup)", std::to_string(options.total_iterations())},
      {"chunk bytes (--chunk)", std::to_string(options.chunk_bytes)},
      {"check (--check)", options.check ? "full" : "off"},
      {"injection (--inject)", inject_name(options.inject)},
      {"seed (--seed)", std::to_string(options.seed)},
      {"number of experts (--preset, --logical)", std::to_string(input.workload.experts)},
      {"number of rows (--preset, --redundant)", std::to_string(input.workload.rows)},
      {"number of tensors (--preset, --tensors)", std::to_string(input.expert.tensors.size())},
      {"number of layers (--preset, --layers)", std::to_string(input.workload.layers.size())},
  };
  for (const Tensor& tensor : input.expert.tensors) {
    facts.push_back({"tensor " + tensor.name + " (--preset, --tensors, --scale)",
                     tensor.type + " of " + std::to_string(tensor.bytes) + " bytes"});
  }
  for (const Layer& layer : input.workload.layers) {
    const std::string name = "layer " + std::to_string(layer.number);
    facts.push_back({name + ", old rows (--policy)", list(layer.before), "row"});
    facts.push_back({name + ", new rows (--policy)", list(layer.after), "row"});
  }
  return facts;
}

}  // namespace

void agree(ranks::CoordinatorConnection& coordinator, const Options& options, const Input& input) {
  ranks::agree(coordinator, options.job.rank, facts(options, input));
}

}  // namespace verbatim::eplb
