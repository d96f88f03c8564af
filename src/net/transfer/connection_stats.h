// What one end of a connection has carried over its life.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "net/transfer/latency_histogram.h"
#include "wire/limits.h"

namespace verbatim {

struct TransferCounts {
  std::uint64_t messages = 0;  // members of groups count each
  std::uint64_t bytes = 0;     // of payload; the receiver does not learn those of optional receives
  std::array<std::uint64_t, wire::kMaxGroup> groups{};  // receives by their number of members, from 1
  std::uint64_t optional = 0;                           // receives done without a completion
};

// The time in which a lane did not work.
struct LaneOutage {
  std::size_t lane = 0;
  std::uint64_t begin_ns = 0;  // since 1970
  std::uint64_t end_ns = 0;    // 0: it did not work again
};

struct ConnectionStats {
  bool sends = false;
  bool atomic = false;  // atomics signalled arrivals
  std::string device;
  std::string peer_host;
  std::uint64_t peer_process = 0;  // random, the same for all connections with one process
  std::size_t qps = 0;
  std::size_t lanes = 1;
  std::size_t lanes_down = 0;
  std::vector<LaneOutage> outages;  // the last ones
  TransferCounts transfer_counts;
  LatencyStats latency;  // empty: not measured
};

}  // namespace verbatim
