// VERBATIM_STALL_WARN_S and VERBATIM_STALL_FAIL_S: looks at each connection from time to time, and reports or fails it
// when it has stalled.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"

namespace verbatim {

// Owned by the monitor; called by the monitoring thread. What a stall is, and its cause, is StallDetector's.
class StallReports {
 public:
  explicit StallReports(const StallSettings& settings) : settings_(settings) {}

  // Checks the connection if its check is due, and sets the time of the next one. Not for a connection that is closing.
  void check(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) const
      VERBATIM_REQUIRES(table.mutex);
  // When the check of a connection is due with which nothing is outstanding. All connections are checked at multiples
  // of the period, so that one wake-up serves them.
  std::uint64_t next_idle_check_ns(std::uint64_t now) const { return next_multiple(now, settings_.idle_period_ns()); }

 private:
  static std::uint64_t next_multiple(std::uint64_t now, std::uint64_t period) { return (now / period + 1) * period; }

  const StallSettings settings_;
};

}  // namespace verbatim
