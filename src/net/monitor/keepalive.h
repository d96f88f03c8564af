// VERBATIM_KEEPALIVE_S: pings all peers. Messages, and progress of RDMA, show that a peer lives. If there is neither
// and the peer's host acknowledges the pings, its process is stopped, and the connection fails. If the host
// acknowledges nothing either, the network of the side channel may have failed alone, or only this TCP connection: the
// channel moves to another one, the comm gets an event at each tick to ask the peer's NIC (Comm::post_probes), and it
// fails when the NIC does not answer.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"

namespace verbatim {

// Owned by the monitor, used under the table's mutex. The monitoring thread calls tick(), a thread that calls watch()
// restart().
class Keepalive {
 public:
  // `timeout_ns` 0: no pings.
  explicit Keepalive(std::uint64_t timeout_ns) : timeout_ns_(timeout_ns) {}

  // For the first connection of the table: its first tick is a whole period away.
  void restart(std::uint64_t now) {
    if (timeout_ns_ != 0) next_tick_ns_ = now + period_ns();
  }
  void tick(ConnectionTable& table, std::uint64_t now) VERBATIM_REQUIRES(table.mutex);
  std::uint64_t next_tick_ns() const { return next_tick_ns_; }

 private:
  void handle_no_answer(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) const
      VERBATIM_REQUIRES(table.mutex);

  // A peer whose last message came just before a tick fails kMissedTicks ticks later, which is within the timeout.
  // Ticks are counted, not time: a process that was itself stopped reads no messages for longer than the timeout, and
  // its peers are alive.
  static constexpr unsigned kTicksPerTimeout = 4;
  static constexpr unsigned kMissedTicks = kTicksPerTimeout - 1;

  std::uint64_t period_ns() const { return timeout_ns_ / kTicksPerTimeout; }

  const std::uint64_t timeout_ns_;
  std::uint64_t next_tick_ns_ = kNever;
};

// A message or an acknowledgement has come from a peer for which a warning was logged that it does not answer.
void handle_answer(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);

}  // namespace verbatim
