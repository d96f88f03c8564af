// The messages that the monitor and the peers exchange over side channels: wire/notice.h.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"

namespace verbatim {

// Called by the monitoring thread.

// Reads the messages that have arrived on a connection's side channel.
void read_peer_messages(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);
// The peer has closed its end, or ended: the side channel is read no more.
void handle_peer_end(ConnectionTable& table, MonitoredConnection& connection, CommEvent event)
    VERBATIM_REQUIRES(table.mutex);
// Sends the failure of the comm, and a status reply whose QP states were read or can be awaited no longer.
void send_due_messages(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex);

}  // namespace verbatim
