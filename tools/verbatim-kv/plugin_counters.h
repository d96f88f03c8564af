// What Verbatim itself says it carried, against what this rank has counted: the proof that the bytes went through it.
#pragma once

#include <cstdint>
#include <string>

namespace verbatim::kv {

// The file that VERBATIM_STATS names in this process; empty when it is unset.
std::string plugin_counters_path();

// After the plugin was unloaded: "equal", "absent" when nothing was written (another plugin, or VERBATIM_STATS unset),
// or what differs.
std::string compare_plugin_counters(const std::string& path, std::uint64_t sent_bytes, std::uint64_t received_bytes);

}  // namespace verbatim::kv
