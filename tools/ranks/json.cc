#include "ranks/json.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "ranks/failure.h"

namespace verbatim::ranks {

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

void check_writable(const std::string& path) {
  const std::filesystem::path file(path);
  const std::filesystem::path directory = file.has_parent_path() ? file.parent_path() : ".";
  std::error_code ignored;
  const bool exists = std::filesystem::exists(file, ignored);
  const bool possible = exists ? !std::filesystem::is_directory(file, ignored) && ::access(file.c_str(), W_OK) == 0
                               : ::access(directory.c_str(), W_OK | X_OK) == 0;
  if (!possible) throw Failure("--json " + path + ": cannot be written", ExitStatus::kUsage);
}

Json with_schema(const Json& json) {
  if (!json.is_array()) {
    Json numbered{{"schema", kJsonSchema}};
    numbered.update(json);
    return numbered;
  }
  Json all = Json::array();
  for (const Json& entry : json) all.push_back(with_schema(entry));
  return all;
}

void write_json(const Json& json, const std::string& path) {
  std::ofstream file(path);
  file << with_schema(json).dump(2) << '\n';
  file.close();
  if (!file) throw Failure("cannot write " + path);
}

}  // namespace verbatim::ranks
