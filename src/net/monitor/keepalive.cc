#include "net/monitor/keepalive.h"

#include <string>
#include <utility>

#include "base/clock.h"
#include "net/diagnose/diagnosis.h"
#include "net/diagnose/path_facts.h"

namespace verbatim {

void Keepalive::tick(ConnectionTable& table, std::uint64_t now) {
  if (now < next_tick_ns_) return;
  restart(now);
  for (auto& [fd, connection] : table.connections) {
    ++table.visits;
    if (connection.peer_closed || connection.closing != nullptr || connection.failure_exchanged) continue;
    Channel& channel = connection.comm->channel();
    if (!channel.is_open()) continue;
    const std::uint64_t progress = connection.comm->peer_progress();
    if (std::exchange(connection.peer_progress, progress) != progress) connection.ticks_without_message = 0;
    if (connection.ticks_without_message++ >= kMissedTicks) handle_no_answer(table, connection, now);
    if (connection.failure_exchanged) continue;
    channel.send_ping();
    if (channel.has_unsent()) table.mark_changed(connection);
  }
}

void Keepalive::handle_no_answer(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) const {
  Comm& comm = *connection.comm;
  const std::uint64_t unheard_ns = (connection.ticks_without_message - 1) * period_ns();
  const std::string& peer = comm.endpoint().peer_name();
  if (comm.channel().is_acknowledged()) {
    // After a cut the acknowledgements may come before the first message: the peer has until the next tick.
    if (connection.no_answer) return handle_answer(table, connection);
    try {
      connection.fail(ErrorKind::kRemote, no_message(peer, unheard_ns, true).c_str());
    } catch (...) {  // no memory
      connection.fail(ErrorKind::kRemote, "the peer has sent nothing (VERBATIM_KEEPALIVE_S): its host answers");
    }
    return table.mark_changed(connection);
  }
  comm.set_channel(ChannelState::kNoAnswer, static_cast<std::uint32_t>(unheard_ns / kNanosecondsPerMillisecond));
  comm.set_event(CommEvent::kProbePeer);
  comm.channel().move(now);
  table.mark_changed(connection);
  if (std::exchange(connection.no_answer, true)) return;
  table.log(LogLevel::kWarn, [&] {
    return "no message from the peer " + peer + " and no acknowledgement of its host on the side channel for " +
           to_seconds(unheard_ns) +
           "; the connection fails if its NIC does not answer either. Next: look at the network of the side channels "
           "between the hosts (VERBATIM_SOCKET_IFNAME): firewalls, switches";
  });
}

void handle_answer(ConnectionTable& table, MonitoredConnection& connection) {
  connection.no_answer = false;
  connection.comm->clear_event(CommEvent::kProbePeer);
  connection.comm->set_channel(ChannelState::kOpen);
  table.log(LogLevel::kInfo, [&] {
    return "the peer " + connection.comm->endpoint().peer_name() + " or its host answers on the side channel again";
  });
}

}  // namespace verbatim
