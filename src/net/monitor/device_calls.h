// The verbs that the monitor calls and that a device may not return from: on a thread that does nothing else.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"
#include "runtime/worker.h"

namespace verbatim {

// The calls for one device, or for the comms that use the same devices: reading its events, reading the states of QPs,
// making new QPs for lanes that are down, advancing lanes for an idle application, destroying closed comms. Its worker
// makes them one after the other. If a device hangs, its own calls wait and no others.
//
// Owned by the monitor. The functions are called by the monitoring thread under the table's mutex.
class DeviceCalls {
 public:
  // `device`: whose events it reads, and its index in the table. nullptr for several devices: each reads its own.
  DeviceCalls(ConnectionTable& table, const Device* device, std::uint32_t index);
  // Of the device's events.
  const EventHandler& handler() const { return handler_; }
  // These three: a second request changes nothing while the first is open.
  static void request_qp_state(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
      VERBATIM_REQUIRES(table.mutex);
  static void request_renewal(MonitoredConnection& connection);
  static void request_advance(MonitoredConnection& connection);
  // Takes back what is requested for the connection, unless a call for it runs.
  static void withdraw(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);
  // A closed connection, which is no longer in the table.
  void destroy(ConnectionTable::Connections::node_type closed) { closed_.insert(std::move(closed)); }

  // The worker makes the calls that are requested. Where the system has no thread for it, they are made here.
  void start(ConnectionTable& table) noexcept VERBATIM_REQUIRES(table.mutex);

 private:
  static void add_request(MonitoredConnection& connection);
  bool has_calls() const { return events_requested_ || requests_ != nullptr || !closed_.empty(); }
  // Makes a call, without the mutex, if one is requested.
  void make_call(ConnectionTable& table) noexcept VERBATIM_REQUIRES(table.mutex);

  const Device* const device_;
  const std::uint32_t index_;
  // Under the table's mutex.
  bool events_requested_ = false;
  MonitoredConnection* requests_ = nullptr;      // a list, the oldest first: MonitoredConnection::next_request
  MonitoredConnection* last_request_ = nullptr;  // of a list that is not empty
  ConnectionTable::Connections closed_;
  EventHandler handler_;
  Worker worker_;
};

}  // namespace verbatim
