// What Verbatim itself says it carried, against the plan: the proof that the bytes went through the plugin.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace verbatim::eplb {

// With the text of ranks::PluginCounters: "equal", "absent", or what differs.
std::string compare_stats(const std::optional<std::string>& text, const std::vector<std::uint64_t>& sent,
                          const std::vector<std::uint64_t>& received);

}  // namespace verbatim::eplb
