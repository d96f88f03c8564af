// The messages that the monitor and the peers exchange over side channels: wire/notice.h.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"
#include "net/monitor/poller.h"

namespace verbatim {

enum class CommSignal : std::uint32_t;

// Owned by the monitor; called by the monitoring thread under the table's mutex.
class PeerMessages {
 public:
  explicit PeerMessages(const Poller& poller) : poller_(poller) {}

  // Reads the messages that have arrived on a connection's side channel.
  void read(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);
  // Sends the failures of comms, and the status replies whose QP states were read or can be awaited no longer.
  void send_due(ConnectionTable& table, std::uint64_t now) VERBATIM_REQUIRES(table.mutex);

 private:
  void handle(ConnectionTable& table, MonitoredConnection& connection, const SideChannel::Message& message)
      VERBATIM_REQUIRES(table.mutex);
  void handle_failure_notice(MonitoredConnection& connection, const SideChannel::Message& message);
  void handle_protocol_error(MonitoredConnection& connection);
  void handle_peer_end(MonitoredConnection& connection, CommSignal signal);

  const Poller& poller_;
};

}  // namespace verbatim
