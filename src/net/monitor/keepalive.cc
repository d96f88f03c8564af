#include "net/monitor/keepalive.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <cstdio>

#include "base/clock.h"
#include "net/transfer/comm.h"

namespace verbatim {
namespace {

// Whether the peer's host has acknowledged everything that was sent; the kernel does so while the process is stopped.
bool host_acknowledges(const UniqueFd& socket) {
  int bytes = 0;
  return ::ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 && bytes == 0;
}

}  // namespace

void Keepalive::tick(ConnectionTable& table, std::uint64_t now) {
  if (timeout_ns_ == 0 || now < next_tick_ns_) return;
  next_tick_ns_ = now + period_ns();
  for (auto& [fd, connection] : table.connections) {
    if (connection.peer_closed || connection.closing != nullptr || connection.failure_exchanged) continue;
    const UniqueFd& socket = connection.comm->side_channel();
    connection.missed_ticks = connection.received_since_tick ? 0 : connection.missed_ticks + 1;
    connection.received_since_tick = false;
    if (connection.missed_ticks < kMissedTicks) {
      connection.channel.send(socket, wire::Notice::without_body(wire::MessageType::kPing));
      continue;
    }
    char why[256];
    std::snprintf(why, sizeof why, "the peer %s has sent nothing for %.1f s (VERBATIM_KEEPALIVE_S): %s",
                  PeerName(*connection.comm).text,
                  static_cast<double>(kMissedTicks * period_ns()) / static_cast<double>(kNanosecondsPerSecond),
                  host_acknowledges(socket) ? "its host answers, the process is stopped or hangs"
                                            : "its host does not answer, it is down, frozen or cut off");
    connection.fail(ErrorKind::kRemote, why);
  }
}

}  // namespace verbatim
