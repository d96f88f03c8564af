// VERBATIM_STATS: what every connection has carried, written as JSON when a context ends. Says what NCCL really asks
// for, and lets a program prove whose transport carried its bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/result.h"
#include "wire/limits.h"

namespace verbatim {

// Of one end of a connection, over its life.
struct TransferCounts {
  std::uint64_t messages = 0;  // members of groups count each
  std::uint64_t bytes = 0;     // of payload; of optional receives the receiver never hears how many
  std::array<std::uint64_t, wire::kMaxGroup> groups{};  // receives by their number of members, from 1
  std::uint64_t optional = 0;                           // receives done without a completion
};

struct ConnectionStats {
  bool sends = false;
  bool atomic = false;  // arrivals were told by atomics
  std::string device;
  std::string peer_host;
  std::uint64_t peer_process = 0;  // random, the same for all connections with one process
  std::size_t qps = 0;
  TransferCounts transfer_counts;
};

// {"version":1,"host":..,"pid":..,"totals":{"send":{..},"recv":{..}},"connections":[..]}
std::string stats_json(const std::string& host, std::span<const ConnectionStats> connections);

// `path` with %p replaced by the process's ID and %h by the host's name.
std::string stats_path(const std::string& path, const std::string& host);

// In one step: a reader sees the file of before or all of the new one.
Status write_stats(const std::string& path, const std::string& json);

}  // namespace verbatim
