#include "net/monitor/graceful_closes.h"

#include "net/monitor/device_calls.h"

namespace verbatim {

bool advance_close(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) {
  const UniqueFd& socket = connection.comm->side_channel();
  connection.close_sent =
      connection.close_sent || connection.send(wire::Notice::without_body(wire::MessageType::kClose));
  const bool both_closed = connection.peer_closed && connection.close_sent && connection.channel.flush(socket);
  if (!both_closed && now < connection.close_deadline_ns) return false;
  DeviceCalls::withdraw(table, connection);
  if (connection.has_calls()) return false;
  table.forget(connection);
  connection.device_calls->destroy(table.connections.extract(socket.get()));
  return true;
}

}  // namespace verbatim
