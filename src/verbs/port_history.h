// The history of a device's ports while the device is open: link outages and the kernel's counters. The failure line of
// a connection reports what has changed since the connection was established.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"

namespace verbatim {

// Counters of one port by name, without those that only count traffic.
using PortCounters = std::map<std::string, std::uint64_t>;

// The files of hw_counters and counters of the port; empty if there are none. `sysfs_path` is
// /sys/class/infiniband/mlx5_0.
PortCounters read_port_counters(const std::string& sysfs_path, std::uint8_t port_num);

// "local_ack_timeout_err +8, out_of_sequence +1": up to `max` counters that have grown, those of failures first.
std::string describe_changes(const PortCounters& before, const PortCounters& now, std::size_t max);

// The outages of one port's link since a point in time.
struct LinkRecord {
  unsigned downs = 0;            // number of outages
  bool down = false;             // the link is down now
  std::uint64_t changed_ns = 0;  // when the link last went down or came up; 0: never
  std::uint64_t outage_ns = 0;   // duration of the last outage, until now if the link is still down
};

// Owned by a Device. Any thread may call it.
class PortHistory {
 public:
  explicit PortHistory(std::string sysfs_path) : sysfs_path_(std::move(sysfs_path)) {}

  // Records that the link went down. False: it was down already.
  bool link_down(std::uint8_t port_num, std::uint64_t now_ns) VERBATIM_EXCLUDES(mutex_);
  // Records that the link came up. Returns how long it was down in ns, 0 if that is unknown.
  std::uint64_t link_up(std::uint8_t port_num, std::uint64_t now_ns) VERBATIM_EXCLUDES(mutex_);
  LinkRecord link_since(std::uint8_t port_num, std::uint64_t since_ns, std::uint64_t now_ns) const
      VERBATIM_EXCLUDES(mutex_);

  // Counters that are at most one second old. They are cached, because many connections are established at a time.
  std::shared_ptr<const PortCounters> recent_counters(std::uint8_t port_num) VERBATIM_EXCLUDES(mutex_);
  PortCounters counters(std::uint8_t port_num) const { return read_port_counters(sysfs_path_, port_num); }

 private:
  static constexpr std::size_t kOutages = 16;  // outages that are kept for each port; the log has all
  struct Outage {
    std::uint64_t begin_ns = 0;
    std::uint64_t end_ns = 0;  // 0: the link is still down
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
