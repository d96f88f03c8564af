// The verbs that the monitor calls and that a device may not return from: on a thread that does nothing else.
#pragma once

#include <cstdint>
#include <thread>

#include "net/monitor/connection_table.h"
#include "net/monitor/poller.h"

namespace verbatim {

class DeviceEvents;
class GracefulCloses;

// The calls for one device, or for the comms that use the same devices: reading its events, reading the states of QPs,
// destroying closed comms. Its thread calls them one after the other and ends when there is none left, so a process
// whose devices have nothing to do has no such thread. If a device hangs, its own calls wait and no others.
//
// Owned by the monitor. The functions are called by the monitoring thread; all but start() under the table's mutex.
class DeviceCalls {
 public:
  // `events` may be nullptr: of several devices each reads its own.
  DeviceCalls(ConnectionTable& table, GracefulCloses& closes, const Poller& poller, DeviceEvents* events)
      : table_(table), closes_(closes), poller_(poller), events_(events) {}
  ~DeviceCalls() {
    if (thread_.joinable()) thread_.join();
  }
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  void read_events() { events_requested_ = true; }
  // While one request is open a second changes nothing: what a hanging device is asked for is awaited once.
  static void request_qp_state(MonitoredConnection& connection, std::uint64_t now);
  // A closed connection, which is no longer in the table.
  void destroy(ConnectionTable::Connections::node_type closed) { closed_.insert(std::move(closed)); }

  // True: there are calls and no thread, and start() must follow.
  bool must_start();
  // Starts the thread. Where the system has none, the calls are made here.
  void start() noexcept;

 private:
  void run() noexcept;
  bool call_next() VERBATIM_EXCLUDES(table_.mutex);

  ConnectionTable& table_;
  GracefulCloses& closes_;
  const Poller& poller_;
  DeviceEvents* const events_;
  // Under the table's mutex.
  bool running_ = false;
  bool events_requested_ = false;
  MonitoredConnection* requests_ = nullptr;  // a list: MonitoredConnection::next_request
  ConnectionTable::Connections closed_;
  std::thread thread_;
};

}  // namespace verbatim
