#include "verbatim-eplb/plan_only.h"

#include "ranks/json.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/posting.h"

namespace verbatim::eplb {
namespace {

using ranks::Json;

Json json_of(const RowFill& fill) {
  switch (fill.how) {
    case Fill::kKeep:
      return "keep";
    case Fill::kReceive:
      return "receive";
    case Fill::kCopy:
      return {"copy", fill.from};
    case Fill::kDuplicate:
      return {"duplicate", fill.from};
  }
  return nullptr;
}

}  // namespace

void print_plan(std::FILE* out, const Options& options) {
  const Input input = make_input(options);
  for (const Layer& layer : input.workload.layers) {
    const LayerPlan plan = plan_layer(input.workload, layer, input.expert, options);
    Json line{
        {"layer", layer.number},      {"ranks", input.workload.ranks},  {"old", layer.before},
        {"new", layer.after},         {"groups", plan.schedule.groups}, {"largest_group", plan.schedule.largest_group},
        {"transfers", Json::array()}, {"rows", Json::array()},          {"packs", Json::array()}};
    for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
      const Transfer& transfer = plan.transfers[i];
      line["transfers"].push_back({transfer.source, transfer.destination, transfer.expert, transfer.source_row,
                                   transfer.destination_row, plan.schedule.group_of[i]});
    }
    for (std::size_t rank = 0; rank < input.workload.ranks; ++rank) {
      const RankPlan own = plan_of_rank(input.workload, layer, plan.transfers, rank);
      for (const RowFill& fill : own.rows) line["rows"].push_back(json_of(fill));
      for (const std::uint32_t pack : own.packs) {
        line["packs"].push_back({rank, plan.transfers[pack].expert, plan.transfers[pack].source_row});
      }
    }
    std::fprintf(out, "%s\n", line.dump().c_str());
  }
}

}  // namespace verbatim::eplb
