// VERBATIM_STATS: what every connection has carried, written as JSON when a context ends. Says what NCCL really asks
// for, and lets a program prove whose transport carried its bytes.
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

// In one step: a reader sees the file of before or all of the new one.
Status write_stats(const std::string& path, const std::string& json);

}  // namespace verbatim
