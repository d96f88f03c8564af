// VERBATIM_STALL_WARN_S and VERBATIM_STALL_FAIL_S: looks at all connections from time to time, and reports or fails
// those that have stalled.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"

namespace verbatim {

// Owned by the monitor; called by the monitoring thread. What a stall is, and its cause, is StallDetector's.
class StallReports {
 public:
  explicit StallReports(const StallSettings& settings) : settings_(settings) {}

  // Checks the connections when it is time. The lines are logged without the mutex.
  void check(ConnectionTable& table) VERBATIM_EXCLUDES(table.mutex);
  std::uint64_t next_check_ns() const { return next_check_ns_; }

 private:
  const StallSettings settings_;
  std::uint64_t next_check_ns_ = 0;
};

}  // namespace verbatim
