// What the control thread and the peers tell each other over the side channels.
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>

#include "base/clock.h"
#include "net/monitor/monitor.h"
#include "net/transfer/comm.h"

namespace verbatim {
namespace {

// A peer that floods us takes turns with the others.
constexpr int kMaxMessagesPerTurn = 16;

// Whether the other host's system has taken all that was sent to it, though its process may not have.
bool host_acknowledges(const UniqueFd& socket) {
  int bytes = 0;
  return ::ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 && bytes == 0;
}

}  // namespace

Monitor::PeerName::PeerName(const Comm& comm) {
  const wire::Hello& remote = comm.endpoint().remote();
  std::snprintf(text, sizeof text, "%.64s (pid %u)", remote.host.c_str(), remote.pid);
}

void Monitor::read_messages(Connection& connection) {
  for (int i = 0; i < kMaxMessagesPerTurn && !connection.peer_closed; ++i) {
    const Result<std::optional<SideChannel::Message>> message =
        connection.channel.receive(connection.comm->side_channel());
    if (!message && message.error().sys_errno == EPROTO) return handle_protocol_error(connection);
    if (!message) return handle_peer_end(connection, CommSignal::kPeerDisconnected);
    if (!*message) return;
    connection.received_since_tick = true;
    handle_message(connection, **message);
  }
}

void Monitor::handle_message(Connection& connection, const SideChannel::Message& message) {
  Comm& comm = *connection.comm;
  switch (message.type) {
    case wire::MessageType::kClose:
      return handle_peer_end(connection, CommSignal::kPeerClosed);
    case wire::MessageType::kPing:
      // Where there is no room the peer has not been reading: it has answers enough to come.
      connection.channel.send(comm.side_channel(), wire::Notice::without_body(wire::MessageType::kPong));
      return;
    case wire::MessageType::kPong:
      return;
    case wire::MessageType::kStatusQuery:
      if (const std::optional<std::uint32_t> id = wire::decode_status_query(message.body)) {
        wire::ConnectionStatus status = connection_status(connection, monotonic_ns());
        status.id = *id;
        connection.channel.send(comm.side_channel(), wire::Notice::status_reply(status));
        return;
      }
      return handle_protocol_error(connection);
    case wire::MessageType::kStatusReply:
      if (const std::optional<wire::ConnectionStatus> status = wire::decode_status_reply(message.body)) {
        if (connection.stall_detector.accept_reply(*status)) next_stall_check_ns_ = 0;
        return;
      }
      return handle_protocol_error(connection);
    case wire::MessageType::kFailed:
      break;
    default:
      return handle_protocol_error(connection);
  }
  const std::optional<wire::FailureNotice> failed = wire::decode_failure(message.body);
  if (!failed) return handle_protocol_error(connection);
  if (connection.failure_exchanged) return;
  connection.failure_exchanged = true;
  if (failed->kind == ErrorKind::kNone) return comm.set_signal(CommSignal::kPeerAborted);
  char why[wire::kMaxFailureText + 128];
  std::snprintf(why, sizeof why, "the peer %s reported: %.*s", PeerName(comm).text,
                static_cast<int>(failed->text.size()), failed->text.data());
  comm.set_failure_reason(ErrorKind::kRemote, why);
  comm.set_signal(CommSignal::kPeerFailed);
}

// What came is no message of ours: nothing that follows it can be told apart either.
void Monitor::handle_protocol_error(Connection& connection) {
  char why[192];
  std::snprintf(why, sizeof why,
                "the peer %s sent what is no message on the side channel: other versions of the plugin?",
                PeerName(*connection.comm).text);
  fail_connection(connection, ErrorKind::kRemote, why);
  handle_peer_end(connection, CommSignal::kPeerDisconnected);
}

void Monitor::handle_peer_end(Connection& connection, CommSignal signal) {
  connection.peer_closed = true;
  static_cast<void>(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.comm->side_channel().get(), nullptr));
  connection.comm->set_signal(signal);
}

// Of a comm that is being forgotten without having failed: it had work outstanding.
void Monitor::send_failure_notice(Connection& connection) {
  if (connection.failure_exchanged || connection.peer_closed) return;
  const Comm& comm = *connection.comm;
  const std::string* text = comm.failure_text();
  const wire::Notice notice =
      text != nullptr ? wire::Notice::failed(comm.error()->kind, *text) : wire::Notice::failed(ErrorKind::kNone, "");
  connection.failure_exchanged = connection.channel.send(comm.side_channel(), notice);
}

void Monitor::fail_connection(Connection& connection, ErrorKind kind, const char* why) {
  if (connection.failure_exchanged) return;
  Comm& comm = *connection.comm;
  connection.failure_exchanged = true;
  connection.channel.send(comm.side_channel(), wire::Notice::failed(kind, why));
  comm.set_failure_reason(kind, why);
  comm.set_signal(CommSignal::kFailedByMonitor);
}

void Monitor::send_failure_notices() {
  for (auto& [fd, connection] : connections_) {
    if (connection.comm->failure_text() != nullptr) send_failure_notice(connection);
  }
}

void Monitor::keepalive_tick(std::uint64_t now) {
  if (settings_.keepalive_ns == 0) {
    next_tick_ns_ = std::numeric_limits<std::uint64_t>::max();
    return;
  }
  if (now < next_tick_ns_) return;
  next_tick_ns_ = now + settings_.keepalive_ns / kTicksPerTimeout;
  for (auto& [fd, connection] : connections_) {
    if (connection.peer_closed || connection.closing != nullptr || connection.failure_exchanged) continue;
    const UniqueFd& socket = connection.comm->side_channel();
    connection.missed_ticks = connection.received_since_tick ? 0 : connection.missed_ticks + 1;
    connection.received_since_tick = false;
    if (connection.missed_ticks < kMissedTicks) {
      connection.channel.send(socket, wire::Notice::without_body(wire::MessageType::kPing));
      continue;
    }
    const std::uint64_t missed_ns = kMissedTicks * (settings_.keepalive_ns / kTicksPerTimeout);
    char why[256];
    std::snprintf(why, sizeof why, "nothing has been heard from the peer %s for %.1f s (VERBATIM_KEEPALIVE_S): %s",
                  PeerName(*connection.comm).text,
                  static_cast<double>(missed_ns) / static_cast<double>(kNanosecondsPerSecond),
                  host_acknowledges(socket) ? "its host answers, the process is stopped or hangs"
                                            : "its host does not answer, it is down, frozen or cut off");
    fail_connection(connection, ErrorKind::kRemote, why);
  }
}

}  // namespace verbatim
