#include "verbatim-kv/plugin_counters.h"

#include <utility>

#include "ranks/json.h"

namespace verbatim::kv {

std::string compare_plugin_counters(const std::optional<std::string>& text, std::uint64_t sent_bytes,
                                    std::uint64_t received_bytes) {
  if (!text) return "absent";
  try {
    const ranks::Json totals = ranks::Json::parse(*text).at("totals");
    for (const auto& [direction, counted] : {std::pair("send", sent_bytes), std::pair("recv", received_bytes)}) {
      const auto plugin_bytes = totals.at(direction).at("bytes").get<std::uint64_t>();
      if (plugin_bytes == counted) continue;
      return std::string(direction) + ": the plugin counted " + std::to_string(plugin_bytes) + " bytes, this rank " +
             std::to_string(counted);
    }
  } catch (const ranks::Json::exception& malformed) {
    return std::string("the plugin's counters cannot be read: ") + malformed.what();
  }
  return "equal";
}

std::string compare_put_counters(const std::optional<std::string>& text, std::uint64_t put_bytes) {
  if (!text) return "absent";
  try {
    const ranks::Json total = ranks::Json::parse(*text).at("totals").at("rma");
    const auto plugin_bytes = total.at("put_bytes").get<std::uint64_t>();
    if (plugin_bytes == put_bytes) return "equal";
    return "put: the plugin counted " + std::to_string(plugin_bytes) + " bytes, this rank " + std::to_string(put_bytes);
  } catch (const ranks::Json::exception& malformed) {
    return std::string("the plugin's counters cannot be read: ") + malformed.what();
  }
}

}  // namespace verbatim::kv
