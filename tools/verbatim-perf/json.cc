#include <fstream>
#include <nlohmann/json.hpp>

#include "verbatim-perf/report.h"

namespace verbatim::perf {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const netapi::Properties& device) {
  return {{"name", device.name},
          {"pci_path", device.pci_path},
          {"guid", device.guid},
          {"port", device.port},
          {"speed_mbit_s", device.speed},
          {"latency_us", device.latency},
          {"ptr_support", device.ptr_support},
          {"reg_is_global", device.reg_is_global},
          {"force_flush", device.force_flush},
          {"max_comms", device.max_comms},
          {"max_recvs", device.max_recvs},
          {"members", device.members},
          {"max_p2p_bytes", device.max_p2p_bytes},
          {"rail_id", device.rail_id},
          {"plane_id", device.plane_id}};
}

Json json_of(const Report& report) {
  const Options& options = report.options;
  const bool checked = options.check_iterations > 0;
  Json json{{"operation", operation_name(options.operation)},
            {"plugin", {{"path", options.plugin}, {"name", report.plugin_name}, {"api_version", report.api_version}}},
            {"type", traffic::element_name(options.type)},
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
  for (const netapi::Properties& device : report.devices) json["devices"].push_back(json_of(device));
  for (const RankInfo& rank : report.ranks) json["ranks"].push_back({{"host", rank.host}, {"pid", rank.pid}});
  for (const Row& row : report.rows) {
    json["rows"].push_back({{"bytes", row.bytes},
                            {"count", row.count},
                            {"time_us", row.time_us},
                            {"algbw_gb_s", row.algbw},
                            {"busbw_gb_s", row.busbw},
                            {"wrong", checked ? Json(row.wrong) : Json()}});
  }
  return json;
}

}  // namespace

void write_json(const Report& report, const std::string& path) {
  std::ofstream file(path);
  file << json_of(report).dump(2) << '\n';
  file.close();
  if (!file) throw Failure("cannot write " + path);
}

}  // namespace verbatim::perf
