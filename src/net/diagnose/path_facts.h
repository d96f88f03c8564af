// What is known of one queue pair's connection at the moment of its failure, and how it is written in a log line.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <optional>
#include <string>

#include "verbs/gid.h"
#include "verbs/mr_cache.h"
#include "verbs/port_history.h"

namespace verbatim {

// The memory of a request that its NIC may not access.
struct RefusedBuffer {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  std::optional<MrRegion> region;  // the registration that contains it
};

// What a connection is known to have completed.
struct CompletedCounts {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  bool peer_responded = false;  // the peer's NIC has sent data or an acknowledgement
};

struct PathEnd {
  std::string host;
  std::string device;  // the verbs device, "mlx5_0"
  unsigned port = 1;
  unsigned gid_index = 0;
  ibv_gid gid = {};
  std::uint32_t qp = 0;
  ibv_mtu mtu = IBV_MTU_256;                         // of the port
  RoceVersion roce_version = RoceVersion::kUnknown;  // of the GID
};

struct PathFacts {
  PathEnd local;
  std::optional<PathEnd> remote;  // once it is known
  bool roce = true;
  bool peer_disconnected = false;  // the side channel had ended before
  int channel_errno = 0;  // the side channel had ended with this error before, and is made again; 0: it is open
  std::optional<RefusedBuffer> buffer;
  std::string peer_report;  // the failure that the peer has reported
  ibv_mtu mtu = IBV_MTU_256;
  unsigned traffic_class = 0;
  unsigned service_level = 0;
  unsigned timeout = 0;  // 4.096 us * 2^timeout
  unsigned retries = 0;
  std::uint64_t age_ns = 0;  // 0: not established
  CompletedCounts completed_counts;
  LinkRecord link;  // of the local port, since the connection was made
  ibv_port_state port_state = IBV_PORT_ACTIVE;
  int port_errno = 0;        // of the query for that state
  bool gid_removed = false;  // the device has another GID at this index than the connection was made with
  std::string counters;      // that have grown since then
};

// "3 h 2 min", "4.29 s", "12 ms".
std::string to_duration(std::uint64_t ns);
// "31.0 s".
std::string to_seconds(std::uint64_t ns);

// Without what happened over time: "node1 mlx5_0:1 GID 3 ::ffff:10.0.0.1 QP 4711 to node2 ..., MTU 4096, TC 0, SL 0".
std::string describe_path(const PathFacts& facts);
// ", timeout 4.29 s, 7 retries (34.4 s in all), 3 h 2 min old, carried ..."; empty when not established.
std::string describe_path_history(const PathFacts& facts);

// A command as log lines show it: "'ip address'".
std::string quoted(const std::string& command);
// The commands that try a path without this plugin, both ends named.
std::string perftest_commands(const PathFacts& facts);

// "10.0.0.1", "2001:db8::1": as the system's tools take it.
std::string ip_of(const ibv_gid& gid);
// "'dmesg | grep mlx5_0' on node1".
std::string kernel_log_command(const PathEnd& end);

}  // namespace verbatim
