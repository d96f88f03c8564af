#include "ranks/json.h"

#include "verbatim-perf/report.h"

namespace verbatim::perf {
namespace {

using ranks::Json;

Json json_of(const Report& report) {
  const Options& options = report.options;
  const bool checked = options.check_iterations > 0;
  Json json{
      {"operation", operation_name(options.operation)},
      {"plugin", {{"path", report.plugin_path}, {"name", report.plugin_name}, {"api_version", report.api_version}}},
      {"memory", memory::kind_name(options.memory)},
      {"merge", options.merge},
      {"channels", options.channels},
      {"chunk_bytes", report.chunk_bytes},
      {"depth", options.depth},
      {"pause_us", options.pause_us},
      {"group", report.group},
      {"iterations", options.iterations},
      {"warmup_iterations", options.warmup_iterations},
      {"check_iterations", options.check_iterations},
      {"devices", Json::array()},
      {"ranks", Json::array()},
      {"rows", Json::array()},
      {"wrong", checked ? Json(report.wrong()) : Json()},
      {"average_busbw_gb_s", report.average_busbw()}};
  if (is_put_operation(options.operation)) {
    json["contexts"] = options.contexts;
    for (const char* const of_messages : {"merge", "channels", "chunk_bytes", "group"}) json.erase(of_messages);
  }
  for (const netapi::Properties& device : report.devices) json["devices"].push_back(ranks::json_of(device));
  for (const RankInfo& rank : report.ranks) {
    json["ranks"].push_back(
        {{"host", rank.host}, {"pid", rank.pid}, {"memory", rank.memory}, {"registered_by", rank.registered_by}});
  }
  for (const Row& row : report.rows) {
    json["rows"].push_back({{"bytes", row.bytes},
                            {"count", row.count},
                            {"type", workload::element_name(row.type)},
                            {"redop", row.redop},
                            {"root", row.root},
                            {"time_us", row.time_us},
                            {"algbw_gb_s", row.algbw},
                            {"busbw_gb_s", row.busbw},
                            {"wrong", checked ? Json(row.wrong) : Json()}});
    if (const auto& in_place = row.in_place) {
      json["rows"].back()["in_place"] = {{"time_us", in_place->time_us},
                                         {"algbw_gb_s", in_place->algbw},
                                         {"busbw_gb_s", in_place->busbw},
                                         {"wrong", in_place->wrong ? Json(*in_place->wrong) : Json()}};
    }
    if (!row.latency) continue;
    json["rows"].back()["latency_us"] = {{"min", row.latency->min_us},
                                         {"p50", row.latency->median_us},
                                         {"p99", row.latency->p99_us},
                                         {"p99_9", row.latency->p999_us}};
  }
  return json;
}

}  // namespace

void write_json(const Report& report, const std::string& path) {
  ranks::write_json(json_of(report), path);
}

}  // namespace verbatim::perf
