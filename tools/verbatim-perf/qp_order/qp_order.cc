// Starts a child process for the premise and for each order, and prints their results.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/table.h"
#include "ranks/json.h"
#include "ranks/scratch_directory.h"
#include "verbatim-perf/child.h"
#include "verbatim-perf/qp_order/measure.h"
#include "verbatim-perf/qp_order/options.h"

namespace verbatim::perf::qp_order {
namespace {

namespace fs = std::filesystem;
using ranks::Json;

// With at least this correlation the device counts as serving in that order.
constexpr double kClear = 0.9;

bool has_rate() {
  const char* const gbps = std::getenv("SOFTVERBS_LINK_GBPS");
  return gbps != nullptr && std::atof(gbps) > 0;
}

Json run_part(const QpOrderOptions& options, const std::string& part, const ranks::Scratch& scratch) {
  const fs::path result = scratch / (part + ".json");
  const auto text = [](auto value) { return std::to_string(value); };
  std::vector<std::string> arguments{fs::read_symlink("/proc/self/exe").string(), "qp-order"};
  for (const auto& [name, value] : {std::pair<std::string, std::string>{"--plugin", options.plugin},
                                    {"--api", text(options.api_version)},
                                    {"--ranks", text(options.ranks)},
                                    {"--flows", text(options.flows)},
                                    {"--qps", text(options.qps)},
                                    {"--bytes", text(options.bytes)},
                                    {"--rounds", text(options.rounds)},
                                    {"--seed", text(options.seed)},
                                    {"--part", part},
                                    {"--result", result.string()}}) {
    arguments.push_back(name);
    arguments.push_back(value);
  }
  if (!options.rotate) arguments.emplace_back("--no-rotation");
  if (options.plugin_log) arguments.emplace_back("--plugin-log");
  const bool is_premise = part == kPremisePart;
  const int qps = is_premise ? 1 : options.qps;
  std::vector<std::string> variables{
      std::string("VERBATIM_QP_ORDER=") + (is_premise ? "native" : part),
      "VERBATIM_QP_DUMP=" + (scratch / (part + ".dump")).string(),
      "VERBATIM_QP_POOL=" + text(options.ranks - 1) + "x" + text(options.flows * options.qps),
      "VERBATIM_QPS_PER_CONNECTION=" + text(qps),
      std::string("VERBATIM_SPLIT_DATA_ON_QPS=") + (qps > 1 ? "1" : "0"),  // so that all QPs send
  };
  if (std::getenv("SOFTVERBS_NAMESPACE") == nullptr) {
    variables.push_back("SOFTVERBS_NAMESPACE=qp-order-" + text(::getpid()));
  }
  if (has_rate()) {
    variables.push_back("SOFTVERBS_TRACE=" + (scratch / (part + ".trace")).string());
  }
  run_process(arguments, variables, scratch / (part + ".log"));
  std::ifstream file(result);
  return Json::parse(file);
}

void print_premise(const Json& premise) {
  const double number = premise["qp_number"];
  const double doorbell = premise["doorbell"];
  std::printf("# premise: %d QPs to as many receivers, doorbells in random order, %d rounds on %s\n",
              premise["qps"].get<int>(), premise["rounds"].get<int>(), premise["device"].get<std::string>().c_str());
  std::printf("# rank correlation of service with QP number %6.3f, with doorbells %6.3f: ", number, doorbell);
  if (number >= kClear && number > doorbell) {
    std::printf("served by QP number\n");
  } else {
    std::printf("this device does not serve by QP number: no order has an effect\n");
  }
}

void print_table(const QpOrderOptions& options, const Json& rows) {
  const bool clocked = rows.front()["virtual_clock"];
  std::printf("# %d ranks, %d connections from each to each other rank, %d QPs each, %zu bytes on each connection%s\n",
              options.ranks, options.flows, options.qps, options.bytes,
              options.rotate ? "" : ", peers requested from rank 0 on");
  std::printf(
      "# first: time until a peer has its first %s of a sender, in %s; jain: of bytes when the first peer has all\n",
      clocked ? "quantum" : "message", clocked ? "slots of one quantum" : "us");
  const cli::Table table({{"order", -12},
                          {"exact%", 7, 1},
                          {"inversions", 10},
                          {"first max", 10, 2},
                          {"first mean", 10, 2},
                          {"jain", 8, 3},
                          {"senders", 8},
                          {"connections", 12},
                          {"bytes", 14}});
  table.print_titles(stdout);
  for (const Json& row : rows) {
    table.print_row(
        stdout, {"  " + row["order"].get<std::string>(),
                 100.0 * row["exact"].get<double>() / std::max(row["qps"].get<double>(), 1.0),
                 row["inversions"].get<std::size_t>(), row["first_max"].get<double>(), row["first_mean"].get<double>(),
                 row["jain"].get<double>(), row["senders"].is_null() ? "-" : row["senders"].dump(),
                 row["connections"].get<std::size_t>(), row["bytes"].get<std::size_t>()});
  }
}

}  // namespace

ranks::ExitStatus run_qp_order(const QpOrderOptions& options) {
  if (!options.part.empty()) return measure(options);
  const ranks::Scratch scratch("qp-order");
  Json report{{"premise", run_part(options, kPremisePart, scratch)}, {"orders", Json::array()}};
  print_premise(report["premise"]);
  for (const std::string& order : options.orders) {
    Json row = run_part(options, order, scratch);
    row["order"] = order;
    report["orders"].push_back(row);
  }
  print_table(options, report["orders"]);
  if (options.flows * options.qps == 1) {
    std::printf("# with one QP from rank to rank there is nothing to interleave: no order gains anything\n");
  }
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << ranks::with_schema(report).dump(2) << "\n";
    if (!file.flush()) throw ranks::Failure(options.json + " cannot be written");
  }
  return ranks::ExitStatus::kOk;
}

}  // namespace verbatim::perf::qp_order
