// The verbs that the monitor calls and that a device may not return from: on a thread that does nothing else.
#pragma once

#include <cstdint>
#include <thread>

#include "net/monitor/connection_table.h"

namespace verbatim {

// The calls for one device, or for the comms that use the same devices: reading its events, reading the states of QPs,
// making new QPs for lanes that are down, advancing lanes for an idle application, destroying closed comms. Its thread
// calls them one after the other and ends when there is none left, so a process whose devices have nothing to do has no
// such thread. If a device hangs, its own calls wait and no others.
//
// Owned by the monitor. The functions are called by the monitoring thread under the table's mutex.
class DeviceCalls {
 public:
  // `device`: whose events it reads, and its index in the table. nullptr for several devices: each reads its own.
  DeviceCalls(const Device* device, std::uint32_t index) : device_(device), index_(index) {}
  ~DeviceCalls() {
    if (thread_.joinable()) thread_.join();
  }
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  void read_events() { events_requested_ = true; }
  // These three: a second request changes nothing while the first is open.
  static void request_qp_state(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
      VERBATIM_REQUIRES(table.mutex);
  static void request_renewal(MonitoredConnection& connection);
  static void request_advance(MonitoredConnection& connection);
  // Takes back what is requested for the connection, unless a call for it runs.
  static void withdraw(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);
  // A closed connection, which is no longer in the table.
  void destroy(ConnectionTable::Connections::node_type closed) { closed_.insert(std::move(closed)); }

  // Starts the thread if there are calls and no thread. Where the system has none, the calls are made here.
  void start(ConnectionTable& table) noexcept VERBATIM_REQUIRES(table.mutex);

 private:
  static void add_request(MonitoredConnection& connection);
  // Makes the calls, each without the mutex.
  void run(ConnectionTable& table) noexcept VERBATIM_REQUIRES(table.mutex);

  const Device* const device_;
  const std::uint32_t index_;
  // Under the table's mutex.
  bool running_ = false;
  bool events_requested_ = false;
  MonitoredConnection* requests_ = nullptr;      // a list, the oldest first: MonitoredConnection::next_request
  MonitoredConnection* last_request_ = nullptr;  // of a list that is not empty
  ConnectionTable::Connections closed_;
  std::thread thread_;
};

}  // namespace verbatim
