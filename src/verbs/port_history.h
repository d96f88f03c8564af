// What happened to a device's ports while it was open: how often and for how long their links were down, and what the
// kernel counted. A connection that fails compares with what was when it was made.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"

namespace verbatim {

// Counters of one port by name, without those of mere traffic.
using PortCounters = std::map<std::string, std::uint64_t>;

// hw_counters and counters of the port; empty where the kernel has none. `sysfs_path` is /sys/class/infiniband/mlx5_0.
PortCounters read_port_counters(const std::string& sysfs_path, std::uint8_t port_num);

// "local_ack_timeout_err +8, out_of_sequence +1": what has grown, the most telling first, at most so many.
std::string describe_changes(const PortCounters& before, const PortCounters& now, std::size_t most);

// Of one port's link, since a moment.
struct LinkRecord {
  unsigned downs = 0;            // how often it went down
  bool down = false;             // it still is
  std::uint64_t changed_ns = 0;  // when it last went down, or came back; 0: never
  std::uint64_t outage_ns = 0;   // how long it was down that time, or has been so far
};

// Any thread. Owned by a Device.
class PortHistory {
 public:
  explicit PortHistory(std::string sysfs_path) : sysfs_path_(std::move(sysfs_path)) {}

  // The link went down; whether it was up until now.
  bool link_down(std::uint8_t port_num, std::uint64_t now_ns) VERBATIM_EXCLUDES(mutex_);
  // It came back; how long it was down, 0 when that is not known.
  std::uint64_t link_up(std::uint8_t port_num, std::uint64_t now_ns) VERBATIM_EXCLUDES(mutex_);
  LinkRecord link_since(std::uint8_t port_num, std::uint64_t since_ns, std::uint64_t now_ns) const
      VERBATIM_EXCLUDES(mutex_);

  // The counters, not older than a second: many connections are made at a time.
  std::shared_ptr<const PortCounters> recent_counters(std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);
  PortCounters counters(std::uint8_t port_num) const { return read_port_counters(sysfs_path_, port_num); }

 private:
  // The last outages are kept: a longer history is what the log is for.
  static constexpr std::size_t kOutages = 16;
  struct Outage {
    std::uint64_t begin_ns = 0;
    std::uint64_t end_ns = 0;  // 0: not over
  };
  struct PortRecord {
    Outage outages[kOutages];
    unsigned downs = 0;
    std::shared_ptr<const PortCounters> counters;
    std::uint64_t counters_ns = 0;
  };

  const std::string sysfs_path_;
  mutable Mutex mutex_;
  std::map<std::uint8_t, PortRecord> ports_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim
