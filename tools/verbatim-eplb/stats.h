// Compares Verbatim's own counters with the plan, which proves that the bytes went through the plugin.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace verbatim::eplb {

// `text` is that of ranks::PluginCounters. Returns "equal", "absent", or the difference.
std::string compare_stats(const std::optional<std::string>& text, const std::vector<std::uint64_t>& sent,
                          const std::vector<std::uint64_t>& received);
// The same of puts, by rank: what the plugin counts by peer of RMA.
std::string compare_put_stats(const std::optional<std::string>& text, const std::vector<std::uint64_t>& put);

}  // namespace verbatim::eplb
