#include "net/monitor/graceful_closes.h"

#include <utility>

#include "base/clock.h"
#include "net/monitor/device_calls.h"
#include "net/transfer/comm.h"

namespace verbatim {

void GracefulCloses::begin(ConnectionTable& table, std::unique_ptr<Comm> comm, std::uint64_t timeout_ns) {
  MonitoredConnection& connection = table.connections.find(comm->side_channel().get())->second;
  ++counts_.find(connection.owner)->second;
  connection.close_deadline_ns = monotonic_ns() + timeout_ns;
  connection.closing = std::move(comm);
}

void GracefulCloses::expire(ConnectionTable& table, const void* owner) {
  for (auto& [fd, connection] : table.connections) {
    if (connection.closing != nullptr && connection.owner == owner) connection.close_deadline_ns = 0;
  }
}

void GracefulCloses::wait(ConnectionTable& table, const void* owner) {
  const auto own = counts_.find(owner);
  if (own == counts_.end()) return;
  while (own->second != 0) table.changed.wait(table.mutex);
  counts_.erase(own);
}

void GracefulCloses::advance(ConnectionTable& table, std::uint64_t now) {
  for (auto at = table.connections.begin(); at != table.connections.end();) {
    MonitoredConnection& connection = at->second;
    const auto next = std::next(at);
    if (connection.closing != nullptr) {
      const UniqueFd& socket = connection.comm->side_channel();
      if (!connection.close_sent) {
        connection.close_sent = connection.channel.send(socket, wire::Notice::without_body(wire::MessageType::kClose));
      }
      const bool both_closed = connection.peer_closed && connection.close_sent && connection.channel.flush(socket);
      if ((both_closed || now >= connection.close_deadline_ns) && !connection.qp_state_requested) {
        poller_.remove(socket.get());
        connection.device_calls->destroy(table.connections.extract(at));
      }
    }
    at = next;
  }
}

}  // namespace verbatim
