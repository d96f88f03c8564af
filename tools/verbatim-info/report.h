// What verbatim-info reports of this host, as JSON: tools/verbatim-info/README.md describes the fields.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace verbatim::info {

constexpr int kSchema = 1;

struct JobSize {
  unsigned ranks = 2;
  unsigned channels = 1;
};

// Opens the plugin's devices twice: by the plugin's own init, which decides "init", and to describe them. Replaces the
// log sink. `root` is put before /sys and /proc for what is read there of GPUs and control groups.
nlohmann::ordered_json make_report(const std::optional<JobSize>& job, const std::string& root);

}  // namespace verbatim::info
