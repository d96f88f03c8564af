#include "verbatim-kv/plugin_counters.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <utility>

#include "ranks/json.h"

namespace verbatim::kv {

std::string plugin_counters_path() {
  const char* const given = std::getenv("VERBATIM_STATS");
  std::string path = given == nullptr ? "" : given;
  if (const std::size_t at = path.find("%p"); at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
  return path;
}

std::string compare_plugin_counters(const std::string& path, std::uint64_t sent_bytes, std::uint64_t received_bytes) {
  std::ifstream file(path);
  if (path.empty() || !file) return "absent";
  try {
    const ranks::Json totals = ranks::Json::parse(file).at("totals");
    for (const auto& [direction, counted] : {std::pair("send", sent_bytes), std::pair("recv", received_bytes)}) {
      const auto plugins = totals.at(direction).at("bytes").get<std::uint64_t>();
      if (plugins == counted) continue;
      return std::string(direction) + ": the plugin counted " + std::to_string(plugins) + " bytes, this rank " +
             std::to_string(counted);
    }
  } catch (const ranks::Json::exception& malformed) {
    return std::string("the plugin's counters cannot be read: ") + malformed.what();
  }
  return "equal";
}

}  // namespace verbatim::kv
