// The asynchronous events of a device: those that end connections, and those of its links and addresses.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

#include "net/monitor/connection_table.h"
#include "net/monitor/poller.h"
#include "verbs/device.h"

namespace verbatim {

// One device. Owned by the monitor. read() is called by the thread of the device's DeviceCalls, without the table's
// mutex: each of its verbs may hang.
class DeviceEvents {
 public:
  // `index` of the device in ConnectionTable::earlier_failures; also its id in the poller.
  DeviceEvents(const Device& device, std::uint32_t index, ConnectionTable& table, const Poller& poller)
      : device_(device), index_(index), table_(table), poller_(poller) {}

  // Makes the descriptor of events non-blocking and has the poller report it, once for each read().
  Status open();
  // Reads all events: signals the comms that they are about, logs what they mean.
  void read() VERBATIM_EXCLUDES(table_.mutex);

 private:
  void dispatch(const ibv_async_event& event) VERBATIM_EXCLUDES(table_.mutex);
  void fail_device() VERBATIM_REQUIRES(table_.mutex);
  void log(const ibv_async_event& event) VERBATIM_EXCLUDES(table_.mutex);
  void log_link_down(std::uint8_t port_num) VERBATIM_EXCLUDES(table_.mutex);
  void log_link_up(std::uint8_t port_num) VERBATIM_EXCLUDES(table_.mutex);
  void log_gid_change(std::uint8_t port_num) VERBATIM_EXCLUDES(table_.mutex);
  // Open connections over that port; 0: over any port.
  std::size_t count_connections(std::uint8_t port_num) VERBATIM_EXCLUDES(table_.mutex);

  const Device& device_;
  const std::uint32_t index_;
  ConnectionTable& table_;
  const Poller& poller_;
};

}  // namespace verbatim
