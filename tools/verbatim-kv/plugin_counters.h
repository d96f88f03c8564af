// Compares Verbatim's own counters with those of this rank, which proves that the bytes went through the plugin.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace verbatim::kv {

// `text` is that of ranks::PluginCounters. Returns "equal", "absent", or the difference.
std::string compare_plugin_counters(const std::optional<std::string>& text, std::uint64_t sent_bytes,
                                    std::uint64_t received_bytes);
// The same of a rank that puts, or is put to.
std::string compare_put_counters(const std::optional<std::string>& text, std::uint64_t put_bytes);

}  // namespace verbatim::kv
