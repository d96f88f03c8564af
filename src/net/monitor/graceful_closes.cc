#include "net/monitor/graceful_closes.h"

#include "net/monitor/device_calls.h"

namespace verbatim {

bool advance_close(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) {
  Channel& channel = connection.comm->channel();
  connection.close_sent =
      connection.close_sent || connection.send(wire::Notice::without_body(wire::MessageType::kClose));
  const bool both_closed = connection.peer_closed && connection.close_sent && channel.flush();
  if (!both_closed && now < connection.close_deadline_ns) return false;
  DeviceCalls::withdraw(table, connection);
  if (connection.has_calls()) return false;
  table.forget(connection);
  connection.device_calls->destroy(table.connections.extract(channel.key()));
  return true;
}

}  // namespace verbatim
