// VERBATIM_STATS: what every connection has carried, written as JSON when a context ends. It shows which calls NCCL
// makes, and proves to a program that this plugin has carried its bytes.
#pragma once

#include <span>
#include <string>

#include "base/result.h"
#include "net/transfer/connection_stats.h"

namespace verbatim {

// {"version":1,"host":..,"pid":..,"totals":{"send":{..},"recv":{..}},"connections":[..]}
std::string stats_json(const std::string& host, std::span<const ConnectionStats> connections);

// `path` with %p replaced by the process's ID and %h by the host's name.
std::string stats_path(const std::string& path, const std::string& host);

// Atomically: a reader sees either the old file or the complete new one.
Status write_stats(const std::string& path, const std::string& json);

}  // namespace verbatim
