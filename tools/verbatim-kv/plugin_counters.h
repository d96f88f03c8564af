// What Verbatim itself says it carried, against what this rank has counted: the proof that the bytes went through it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace verbatim::kv {

// With the text of ranks::PluginCounters: "equal", "absent", or what differs.
std::string compare_plugin_counters(const std::optional<std::string>& text, std::uint64_t sent_bytes,
                                    std::uint64_t received_bytes);

}  // namespace verbatim::kv
