#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "ranks/json.h"
#include "verbatim-perf/report.h"

namespace verbatim::perf {
namespace {

using ranks::Json;

constexpr int kFileVersion = 3;
constexpr std::string_view kJsonSuffix = ".json";
constexpr int kMaxNames = 1000;

// nccl-tests writes words.
const char* word(bool value) {
  return value ? "true" : "false";
}

Json json_of(const Measured& measured) {
  return {{"time", measured.time_us},
          {"alg_bw", measured.algbw},
          {"bus_bw", measured.busbw},
          {"nwrong", measured.wrong ? Json(static_cast<double>(*measured.wrong)) : Json()}};
}

Json json_of(const IterationTimes& times, int skipped) {
  const std::vector<double> slowest = slowest_of(times);
  const IterationSummary summary = summary_of(slowest, skipped);
  Json json{{"skipped_iterations", skipped}, {"min_us", summary.min},
            {"max_us", summary.max},         {"avg_us", summary.mean},
            {"p50_us", summary.p50},         {"p95_us", summary.p95},
            {"p99_us", summary.p99},         {"stdev_us", summary.deviation},
            {"cv_pct", summary.variation()}, {"times_us", slowest}};
  if (times.size() > 1) json["per_process_max_times_us"] = times;
  return json;
}

Json config_of(const Report& report) {
  const Options& options = report.options;
  Json json{{"nthreads", options.threads},
            {"ngpus", options.gpus},
            {"minimum_bytes", options.min_bytes},
            {"maximum_bytes", options.max_bytes},
            {"warmup_iters", options.warmup_iterations},
            {"iterations", options.iterations},
            {"aggregated_iterations", 1},
            {"validation", options.check_iterations},
            {"graph", 0},
            {"blocking_collectives", word(false)},
            {"per_iter_timing", word(options.per_iteration)},
            {"per_iter_skip", options.per_iteration_skip},
            {"parallel_init", word(false)},
            {"devices", Json::array()}};
  if (options.factor > 1) {
    json["step_factor"] = options.factor;
  } else {
    json["step_bytes"] = options.step_bytes;
  }
  for (std::size_t i = 0; i < report.ranks.size(); ++i) {
    json["devices"].push_back({{"rank", i},
                               {"group", 0},
                               {"pid", report.ranks[i].pid},
                               {"hostname", report.ranks[i].host},
                               {"device", number_on_host(report, i)},
                               {"device_hex", pci_of(report.devices.front())},
                               {"device_info", report.plugin_name}});
  }
  return json;
}

Json json_of(const Report& report, const Row& row) {
  const Options& options = report.options;
  char root[16];
  std::snprintf(root, sizeof root, "%6d", row.root);
  Json json{{"size", row.bytes},    {"count", row.count}, {"type", workload::element_name(row.type)},
            {"redop", row.redop},   {"root", root},       {"actual_iterations", options.iterations},
            {"experiment_name", ""}};
  std::optional<std::uint64_t> wrong = row.wrong;
  if (options.check_iterations == 0) wrong.reset();
  json["out_of_place"] = json_of(Measured{row.time_us, row.algbw, row.busbw, wrong});
  json["in_place"] = json_of(*row.in_place);
  if (options.per_iteration) {
    json["out_of_place_per_iter"] = json_of(row.iterations, options.per_iteration_skip);
    json["in_place_per_iter"] = json_of(row.in_place->iterations, options.per_iteration_skip);
  }
  return json;
}

// The name of a new, empty file: `path`, or the first of `path`.0, `path`.1, ... that does not exist.
std::string new_file(const std::string& path) {
  std::string name = path;
  for (int i = 0; i < kMaxNames; ++i) {
    const int fd = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) {
      ::close(fd);
      return name;
    }
    if (errno != EEXIST) break;
    name = path + "." + std::to_string(i);
  }
  throw Failure("-J " + name + ": " + std::strerror(errno));
}

}  // namespace

NcclTestsJson::NcclTestsJson(std::string path, std::vector<std::string> arguments)
    : path_(path.ends_with(kJsonSuffix) ? std::move(path) : ""),
      arguments_(std::move(arguments)),
      start_(time_of_day()) {}

void NcclTestsJson::write(const Report& report) const {
  if (path_.empty()) return;
  const Options& options = report.options;
  const double busbw = report.average_busbw();
  const std::string result = report.busbw_result();
  Json json{{"version", kFileVersion},
            {"start_time", start_},
            {"args", arguments_},
            {"env", Json::array()},  // it may hold secrets
            {"nccl_version", 0},
            {"config", config_of(report)},
            {"results", Json::array()},
            {"out_of_bounds", {{"count", report.wrong()}, {"okay", word(report.wrong() == 0)}}},
            {"average_bus_bandwidth",
             {{"bandwidth", busbw}, {"okay", options.required_busbw == -1 ? "unchecked" : word(result == "OK")}}},
            {"errors", Json::array()},
            {"end_time", time_of_day()}};
  for (const Row& row : report.rows) json["results"].push_back(json_of(report, row));
  ranks::write_json(json, new_file(path_));
}

}  // namespace verbatim::perf
