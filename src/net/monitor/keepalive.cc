#include "net/monitor/keepalive.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <cstdio>

#include "net/diagnose/path_facts.h"

namespace verbatim {
namespace {

// Whether the peer's host has acknowledged everything that was sent; the kernel does so while the process is stopped.
bool host_acknowledges(const UniqueFd& socket) {
  int bytes = 0;
  return ::ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 && bytes == 0;
}

}  // namespace

void Keepalive::tick(ConnectionTable& table, std::uint64_t now) {
  if (now < next_tick_ns_) return;
  restart(now);
  for (auto& [fd, connection] : table.connections) {
    ++table.visits;
    if (connection.peer_closed || connection.closing != nullptr || connection.failure_exchanged) continue;
    if (connection.ticks_without_message++ < kMissedTicks) {
      connection.send(wire::Notice::without_body(wire::MessageType::kPing));
      if (connection.channel.has_unsent()) table.mark_changed(connection);
      continue;
    }
    char why[256];
    std::snprintf(why, sizeof why, "the peer %s has sent nothing for %s (VERBATIM_KEEPALIVE_S): %s",
                  connection.comm->endpoint().peer_name().c_str(), to_seconds(kMissedTicks * period_ns()).c_str(),
                  host_acknowledges(connection.comm->side_channel())
                      ? "its host answers, the process is stopped or hangs"
                      : "its host does not answer, it is down, frozen or cut off");
    connection.fail(ErrorKind::kRemote, why);
    table.mark_changed(connection);
  }
}

}  // namespace verbatim
