// What the control thread and the peers tell each other over the side channels.
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>

#include "base/clock.h"
#include "net/comm.h"
#include "net/control.h"

namespace verbatim {
namespace {

// A peer that floods us takes turns with the others.
constexpr int kMessagesAtATime = 16;

// Whether the other host's system has taken all that was sent to it, though its process may not have.
bool host_answers(const UniqueFd& socket) {
  int bytes = 0;
  return ::ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 && bytes == 0;
}

}  // namespace

ControlThread::PeerName::PeerName(const Comm& comm) {
  const wire::Hello& remote = comm.endpoint().remote();
  std::snprintf(text, sizeof text, "%.64s (pid %u)", remote.host.c_str(), remote.pid);
}

void ControlThread::hear_peer(Connection& connection) {
  for (int i = 0; i < kMessagesAtATime && !connection.peer_closed; ++i) {
    const Result<std::optional<SideChannel::Message>> message =
        connection.channel.receive(connection.comm->side_channel());
    if (!message && message.error().sys_errno == EPROTO) return distrust(connection);
    if (!message) return end_of_peer(connection, CommSignal::kPeerGone);
    if (!*message) return;
    connection.heard = true;
    hear(connection, **message);
  }
}

void ControlThread::hear(Connection& connection, const SideChannel::Message& message) {
  Comm& comm = *connection.comm;
  switch (message.type) {
    case wire::MessageType::kBye:
      return end_of_peer(connection, CommSignal::kPeerClosed);
    case wire::MessageType::kPing:
      // Where there is no room the peer has not been reading: it has answers enough to come.
      connection.channel.send(comm.side_channel(), wire::Notice::without_body(wire::MessageType::kPong));
      return;
    case wire::MessageType::kPong:
      return;
    case wire::MessageType::kAsk:
      if (const std::optional<std::uint32_t> id = wire::decode_ask(message.body)) {
        wire::View view = view_of(connection, monotonic_ns());
        view.id = *id;
        connection.channel.send(comm.side_channel(), wire::Notice::view(view));
        return;
      }
      return distrust(connection);
    case wire::MessageType::kView:
      if (const std::optional<wire::View> view = wire::decode_view(message.body)) {
        if (connection.watch.hear(*view)) next_look_ns_ = 0;
        return;
      }
      return distrust(connection);
    case wire::MessageType::kFailed:
      break;
    default:
      return distrust(connection);
  }
  const std::optional<wire::Failed> failed = wire::decode_failed(message.body);
  if (!failed) return distrust(connection);
  if (connection.failure_told) return;
  connection.failure_told = true;
  if (failed->kind == ErrorKind::kNone) return comm.raise(CommSignal::kPeerGaveUp);
  char why[wire::kMaxFailureText + 128];
  std::snprintf(why, sizeof why, "the peer %s reported: %.*s", PeerName(comm).text,
                static_cast<int>(failed->text.size()), failed->text.data());
  comm.pass_verdict(ErrorKind::kRemote, why);
  comm.raise(CommSignal::kPeerFailed);
}

// What came is no message of ours: nothing that follows it can be told apart either.
void ControlThread::distrust(Connection& connection) {
  char why[192];
  std::snprintf(why, sizeof why,
                "the peer %s sent what is no message on the side channel: other versions of the plugin?",
                PeerName(*connection.comm).text);
  condemn(connection, ErrorKind::kRemote, why);
  end_of_peer(connection, CommSignal::kPeerGone);
}

void ControlThread::end_of_peer(Connection& connection, CommSignal signal) {
  connection.peer_closed = true;
  static_cast<void>(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.comm->side_channel().get(), nullptr));
  connection.comm->raise(signal);
}

// Of a comm that is being forgotten without having failed: it had work outstanding.
void ControlThread::tell_failure(Connection& connection) {
  if (connection.failure_told || connection.peer_closed) return;
  const Comm& comm = *connection.comm;
  const std::string* text = comm.failure_text();
  const wire::Notice notice =
      text != nullptr ? wire::Notice::failed(comm.error()->kind, *text) : wire::Notice::failed(ErrorKind::kNone, "");
  connection.failure_told = connection.channel.send(comm.side_channel(), notice);
}

void ControlThread::condemn(Connection& connection, ErrorKind kind, const char* why) {
  if (connection.failure_told) return;
  Comm& comm = *connection.comm;
  connection.failure_told = true;
  connection.channel.send(comm.side_channel(), wire::Notice::failed(kind, why));
  comm.pass_verdict(kind, why);
  comm.raise(CommSignal::kCondemned);
}

void ControlThread::tell_failures() {
  for (auto& [fd, connection] : connections_) {
    if (connection.comm->failure_text() != nullptr) tell_failure(connection);
  }
}

void ControlThread::beat(std::uint64_t now) {
  if (settings_.keepalive_ns == 0) {
    next_beat_ns_ = std::numeric_limits<std::uint64_t>::max();
    return;
  }
  if (now < next_beat_ns_) return;
  next_beat_ns_ = now + settings_.keepalive_ns / kBeats;
  for (auto& [fd, connection] : connections_) {
    if (connection.peer_closed || connection.parked != nullptr || connection.failure_told) continue;
    const UniqueFd& socket = connection.comm->side_channel();
    connection.silent_beats = connection.heard ? 0 : connection.silent_beats + 1;
    connection.heard = false;
    if (connection.silent_beats < kSilentBeats) {
      connection.channel.send(socket, wire::Notice::without_body(wire::MessageType::kPing));
      continue;
    }
    const std::uint64_t silent_ns = kSilentBeats * (settings_.keepalive_ns / kBeats);
    char why[256];
    std::snprintf(why, sizeof why, "nothing has been heard from the peer %s for %.1f s (VERBATIM_KEEPALIVE_S): %s",
                  PeerName(*connection.comm).text,
                  static_cast<double>(silent_ns) / static_cast<double>(kNanosecondsPerSecond),
                  host_answers(socket) ? "its host answers, the process is stopped or hangs"
                                       : "its host does not answer, it is down, frozen or cut off");
    condemn(connection, ErrorKind::kRemote, why);
  }
}

}  // namespace verbatim
