// VERBATIM_STATS: a JSON file with the messages and bytes of connections, and with what RMA has carried. Each context
// that ends rewrites the file, with the connections of all contexts of the process that have ended. The file shows
// which receives NCCL posts, and that the bytes of an application went through this plugin.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/result.h"
#include "net/monitor/rma_stats.h"
#include "net/transfer/connection_stats.h"

namespace verbatim {

// `schema` is incremented when the meaning of a key changes or a key is removed.
// `process_id` is what the files of other processes have as peer_process.
// {"schema":1,"host":..,"pid":..,"process":..,"totals":{"send":{..},"recv":{..},"rma":{..}},
// "connections":[..],"rma":[..]}
std::string stats_json(const std::string& host, std::uint64_t process_id, std::span<const ConnectionStats> connections,
                       std::span<const RmaStats> rma = {});

std::string read_host_name();

// `path` with %p replaced by the process's ID and %h by the host's name.
std::string expand_path(const std::string& path, const std::string& host);

// Warns of a path that cannot be written, so that the user learns it before the job has run. Empty: no file is written.
void warn_of_stats_path(const std::string& path);

// Replaces the file atomically: a reader sees either the old file or the complete new one.
Status write_stats(const std::string& path, const std::string& json);

}  // namespace verbatim
