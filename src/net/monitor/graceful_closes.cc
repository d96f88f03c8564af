#include "net/monitor/graceful_closes.h"

#include "net/monitor/device_calls.h"

namespace verbatim {

void advance_closes(ConnectionTable& table, std::uint64_t now) {
  for (auto next = table.connections.begin(); next != table.connections.end();) {
    const auto at = next++;
    MonitoredConnection& connection = at->second;
    if (connection.closing == nullptr) continue;
    const UniqueFd& socket = connection.comm->side_channel();
    connection.close_sent =
        connection.close_sent || connection.send(wire::Notice::without_body(wire::MessageType::kClose));
    const bool both_closed = connection.peer_closed && connection.close_sent && connection.channel.flush(socket);
    if ((!both_closed && now < connection.close_deadline_ns) || connection.qp_state_requested) continue;
    table.poller.remove(socket.get());
    connection.device_calls->destroy(table.connections.extract(at));
  }
}

}  // namespace verbatim
