#include "verbatim-eplb/nixl_run.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "nixl/run.h"
#include "verbatim-eplb/injection.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/posting.h"
#include "verbatim-eplb/report.h"

namespace verbatim::eplb {
namespace {

using ranks::ExitStatus;
using ranks::Json;

const char* fill_name(Fill how) {
  switch (how) {
    case Fill::kKeep:
      return "keep";
    case Fill::kCopy:
      return "copy";
    case Fill::kReceive:
      return "receive";
    case Fill::kDuplicate:
      return "duplicate";
  }
  return "?";
}

Json planned_layer_json(const Workload& workload, const Layer& layer, const LayerPlan& plan) {
  Json json{{"before", layer.before}, {"after", layer.after}, {"transfers", Json::array()}, {"rows", Json::array()}};
  for (const Transfer& transfer : plan.transfers) {
    json["transfers"].push_back(std::vector<std::uint32_t>{transfer.source, transfer.destination, transfer.expert,
                                                           transfer.source_row, transfer.destination_row});
  }
  for (std::size_t rank = 0; rank < workload.ranks; ++rank) {
    for (const RowFill& fill : plan_of_rank(workload, layer, plan.transfers, rank).rows) {
      json["rows"].push_back(Json(std::make_pair(fill_name(fill.how), fill.from)));
    }
  }
  return json;
}

// What nixl_eplb.py reads.
Json nixl_plan(const Options& options, const Input& input, const std::vector<LayerPlan>& plans) {
  Json plan{{"ranks", input.workload.ranks},
            {"local_rows", input.workload.local_rows()},
            {"seed", options.seed},
            {"warmup", options.warmup},
            {"iterations", options.iterations},
            {"check", options.check},
            {"watchdog_s", options.watchdog_s},
            {"pages", memory::pages_name(options.pages)},
            {"flip", nullptr},
            {"tensors", Json::array()},
            {"layers", Json::array()}};
  if (options.inject == Inject::kFlipByte) {
    const Injection injection = place_injection(options, input, plans);
    plan["flip"] = std::make_pair(injection.layer, injection.rank);
  }
  for (const Tensor& tensor : input.expert.tensors) plan["tensors"].push_back(tensor.bytes);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    plan["layers"].push_back(planned_layer_json(input.workload, input.workload.layers[i], plans[i]));
  }
  return plan;
}

// Adds what one rank has measured and found. The time of a layer is that of the slowest rank.
void add_layers(Report& report, const Json& layers) {
  for (std::size_t i = 0; i < report.layers.size(); ++i) {
    LayerRow& row = report.layers[i];
    const auto times_ns = layers.at(i).at("times_ns").get<std::vector<std::uint64_t>>();
    row.times_us.resize(times_ns.size());
    for (std::size_t k = 0; k < times_ns.size(); ++k) {
      row.times_us[k] = std::max(row.times_us[k], static_cast<double>(times_ns[k]) / 1000);
    }
    const std::uint64_t wrong = layers.at(i).at("wrong");
    row.wrong += wrong;
    report.wrong_bytes += wrong;
    if (wrong > 0 && report.first_wrong.empty()) report.first_wrong = layers.at(i).at("first_wrong");
  }
}

RankSummary nixl_summary(const Json& rank) {
  RankSummary summary;
  rank.at("received").get_to(summary.received);
  rank.at("operations").get_to(summary.operations);
  rank.at("row_bytes").get_to(summary.weights_bytes);
  summary.new_rows_bytes = summary.weights_bytes;
  rank.at("allocated_bytes").get_to(summary.allocated_bytes);
  summary.stats = "absent";
  return summary;
}

// The bytes that each rank reads from each other rank over all iterations.
std::vector<std::vector<std::uint64_t>> planned_reads(const Options& options, const Input& input,
                                                      const std::vector<LayerPlan>& plans) {
  const std::size_t ranks = input.workload.ranks;
  std::vector<std::vector<std::uint64_t>> reads(ranks, std::vector<std::uint64_t>(ranks));
  for (const LayerPlan& plan : plans) {
    for (const Transfer& transfer : plan.transfers) {
      reads[transfer.destination][transfer.source] +=
          input.expert.bytes() * static_cast<std::uint64_t>(options.total_iterations());
    }
  }
  return reads;
}

}  // namespace

ExitStatus run_over_nixl(const Options& options) {
  const Input input = make_input(options);
  const std::vector<LayerPlan> plans = plan_layers(options, input);
  Report report{options, input};
  for (std::size_t i = 0; i < plans.size(); ++i) {
    report.layers.push_back(planned_layer(options, input, i, plans[i]));
  }
  const Json result = nixl::run(options.python, "nixl_eplb", nixl_plan(options, input, plans));
  report.transport = {{"over", nixl::kName},
                      {"name", result.at("over").get<std::string>() + " (UCX backend)"},
                      {"memory", memory::describe_host_memory(options.pages)},
                      {"registered_by", "NIXL"}};
  const auto planned = planned_reads(options, input, plans);
  for (const Json& rank : result.at("ranks")) {
    add_layers(report, rank.at("layers"));
    report.by_rank.push_back(nixl_summary(rank));
  }
  for (std::size_t rank = 0; rank < report.by_rank.size(); ++rank) {
    RankSummary& summary = report.by_rank[rank];
    for (const RankSummary& reader : report.by_rank) summary.sent.push_back(reader.received.at(rank));
    if (summary.received == planned[rank]) continue;
    report.errors.push_back("rank " + std::to_string(rank) + " has read other amounts than planned");
  }
  print_head(stdout, report);
  print_table(stdout, report);
  if (!report.first_wrong.empty()) ranks::print_error("first wrong byte: " + report.first_wrong);
  if (!options.json.empty()) write_report(report, options.json);
  return report.wrong_bytes == 0 && report.errors.empty() ? ExitStatus::kOk : ExitStatus::kWrong;
}

}  // namespace verbatim::eplb
