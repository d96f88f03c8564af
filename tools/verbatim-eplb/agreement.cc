#include "verbatim-eplb/agreement.h"

#include <string>
#include <vector>

#include "ranks/failure.h"

namespace verbatim::eplb {
namespace {

std::string list(const std::vector<int>& rows) {
  std::string text;
  for (const int row : rows) text += (text.empty() ? "" : ",") + std::to_string(row);
  return text;
}

// Everything that must be the same, as name and value, in an order that puts the plain causes first.
std::vector<std::string> facts(const Options& options, const Input& input) {
  std::vector<std::string> facts{
      "number of ranks",
      std::to_string(options.job.nranks),
      "mode",
      mode_name(options.mode),
      "transport",
      options.over == Over::kNccl ? "nccl" : "plugin",
      "operations a group",
      std::to_string(options.ops_per_group),
      "iterations",
      std::to_string(options.rounds()),
      "chunk bytes",
      std::to_string(options.chunk_bytes),
      "check",
      options.check ? "full" : "off",
      "injection",
      std::to_string(static_cast<int>(options.inject)),
      "seed",
      std::to_string(options.seed),
      "number of experts",
      std::to_string(input.workload.experts),
      "number of rows",
      std::to_string(input.workload.rows),
      "number of tensors",
      std::to_string(input.expert.tensors.size()),
      "number of layers",
      std::to_string(input.workload.layers.size()),
  };
  for (const Tensor& tensor : input.expert.tensors) {
    facts.insert(facts.end(),
                 {"tensor " + tensor.name, tensor.type + " of " + std::to_string(tensor.bytes) + " bytes"});
  }
  for (const Layer& layer : input.workload.layers) {
    const std::string name = "layer " + std::to_string(layer.number);
    facts.insert(facts.end(), {name + ", old rows", list(layer.before), name + ", new rows", list(layer.after)});
  }
  return facts;
}

// The number of the first entry of two lists that differs.
std::size_t first_difference(const std::string& one, const std::string& other) {
  std::size_t entry = 0;
  for (std::size_t i = 0; i < std::min(one.size(), other.size()) && one[i] == other[i]; ++i) {
    if (one[i] == ',') ++entry;
  }
  return entry;
}

}  // namespace

void agree(ranks::Link& link, const Options& options, const Input& input) {
  const std::vector<std::string> all = link.all_gather(ranks::pack(facts(options, input)));
  const std::vector<std::string> first = ranks::unpack(all.front());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    if (options.job.rank != 0) link.barrier();  // one says it for all, and this ends with the job
    const std::vector<std::string> other = ranks::unpack(all[rank]);
    for (std::size_t i = 0; i + 1 < std::min(first.size(), other.size()); i += 2) {
      if (first[i] == other[i] && first[i + 1] == other[i + 1]) continue;
      std::string what = first[i];
      std::string theirs = other[i + 1];
      std::string ours = first[i + 1];
      if (first[i] != other[i]) {
        theirs = other[i];
        ours = first[i];
      } else if (what.ends_with("rows") && what.starts_with("layer")) {
        what += ", row " + std::to_string(first_difference(theirs, ours));
        theirs = ours = "another expert";
      }
      std::string disagreement = "rank " + std::to_string(rank) + " disagrees with rank 0 about the ";
      disagreement += what;
      if (theirs != ours) disagreement.append(": ").append(theirs).append(" there, ").append(ours).append(" here");
      throw ranks::Failure(disagreement, ranks::ExitStatus::kUsage);
    }
    throw ranks::Failure("rank " + std::to_string(rank) + " disagrees with rank 0", ranks::ExitStatus::kUsage);
  }
}

}  // namespace verbatim::eplb
