#include "verbatim-eplb/stats.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

namespace verbatim::eplb {
namespace {

// Bytes by peer in ascending order, without zeros. The plugin's names of peers are not ranks, so only the amounts can
// be compared.
std::vector<std::uint64_t> amounts(std::vector<std::uint64_t> bytes) {
  std::erase(bytes, std::uint64_t{0});
  std::sort(bytes.begin(), bytes.end());
  return bytes;
}

std::vector<std::uint64_t> amounts(const nlohmann::json& connections, const std::string& direction) {
  std::map<std::string, std::uint64_t> by_peer;
  for (const nlohmann::json& connection : connections) {
    if (connection.at("direction") == direction) {
      // Processes of one machine have the same peer name.
      const std::string peer = connection.at("peer").dump() + connection.value("peer_process", std::string());
      by_peer[peer] += connection.at("bytes").get<std::uint64_t>();
    }
  }
  std::vector<std::uint64_t> bytes;
  for (const auto& [peer, amount] : by_peer) bytes.push_back(amount);
  return amounts(bytes);
}

std::string list(const std::vector<std::uint64_t>& values) {
  std::string text;
  for (const std::uint64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return text.empty() ? "nothing" : text;
}

}  // namespace

std::string compare_stats(const std::optional<std::string>& text, const std::vector<std::uint64_t>& sent,
                          const std::vector<std::uint64_t>& received) {
  if (!text) return "absent";
  try {
    const nlohmann::json json = nlohmann::json::parse(*text);
    for (const auto& [direction, planned] : {std::pair("send", &sent), std::pair("recv", &received)}) {
      const auto total = json.at("totals").at(direction).at("bytes").get<std::uint64_t>();
      const std::uint64_t wanted = std::accumulate(planned->begin(), planned->end(), std::uint64_t{0});
      if (total != wanted) {
        return std::string(direction) + ": the plugin counted " + std::to_string(total) + " bytes, the plan has " +
               std::to_string(wanted);
      }
      const std::vector<std::uint64_t> counted = amounts(json.at("connections"), direction);
      if (counted != amounts(*planned)) {
        return std::string(direction) + ": by peer the plugin counted " + list(counted) + " bytes, the plan has " +
               list(amounts(*planned));
      }
    }
  } catch (const nlohmann::json::exception& error) {
    return std::string("the plugin's counters cannot be read: ") + error.what();
  }
  return "equal";
}

std::string compare_put_stats(const std::optional<std::string>& text, const std::vector<std::uint64_t>& put) {
  if (!text) return "absent";
  try {
    const nlohmann::json json = nlohmann::json::parse(*text);
    std::vector<std::uint64_t> counted(put.size());
    for (const nlohmann::json& contexts : json.at("rma")) {
      for (const nlohmann::json& queue : contexts.at("queues")) {
        const auto peer = queue.at("peer").get<std::size_t>();
        counted.resize(std::max(counted.size(), peer + 1));
        counted[peer] += queue.at("completed").at("put_bytes").get<std::uint64_t>();
      }
    }
    if (counted == put) return "equal";
    return "put: by rank the plugin counted " + list(counted) + " bytes, the plan has " + list(put);
  } catch (const nlohmann::json::exception& error) {
    return std::string("the plugin's counters cannot be read: ") + error.what();
  }
}

}  // namespace verbatim::eplb
