#include "net/monitor/connection_table.h"

#include <cstring>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/socket.h"
#include "net/monitor/lost_channels.h"
#include "net/monitor/peer_messages.h"

namespace verbatim {

wire::ConnectionStatus MonitoredConnection::status(std::uint64_t now) const {
  constexpr unsigned kRecentFlags = wire::ConnectionStatus::kSendRefused | wire::ConnectionStatus::kTested;
  wire::ConnectionStatus status = comm->status();
  status.flags = static_cast<std::uint16_t>(status.flags | (stall_detector.local_status().flags & kRecentFlags));
  if (comm->failure_text() != nullptr) status.flags |= wire::ConnectionStatus::kFailed;
  status.qp_state = static_cast<std::uint8_t>(qp_state_requested ? IBV_QPS_UNKNOWN : qp_state);
  if (stall_detector.has_outstanding()) {
    status.no_progress_ms = static_cast<std::uint32_t>(stall_detector.stalled_ns(now) / kNanosecondsPerMillisecond);
  }
  return status;
}

wire::ConnectionEnd MonitoredConnection::end() const {
  const wire::Hello& remote = comm->endpoint().remote();
  return {{remote.secret, remote.attempt}, comm->kind() == CommKind::kSend ? 1U : 0U};
}

void MonitoredConnection::find_addresses() {
  const UniqueFd& socket = comm->side_channel();
  const Result<sockaddr_storage> peer = remote_address(socket);
  const Result<sockaddr_storage> own = local_address(socket);
  if (!peer || !own || (peer->ss_family != AF_INET && peer->ss_family != AF_INET6)) return;
  if (addresses == nullptr) addresses.reset(new (std::nothrow) Addresses);
  if (addresses == nullptr) return;
  std::memcpy(&addresses->own, &*own, sizeof addresses->own);
  std::memcpy(&addresses->peer, &*peer, sizeof addresses->peer);
}

bool MonitoredConnection::send_ping() {
  if (!send(wire::Notice::without_body(wire::MessageType::kPing))) return false;
  ++pings_sent;
  return true;
}

void MonitoredConnection::send_failure_notice() {
  if ((failure_exchanged && !failure_unsent) || peer_closed) return;
  const std::string* text = comm->failure_text();
  const wire::Notice notice =
      text != nullptr ? wire::Notice::failed(comm->error()->kind, *text) : wire::Notice::failed(ErrorKind::kNone, "");
  if (!send(notice)) return;
  failure_exchanged = true;
  failure_unsent = false;
}

void MonitoredConnection::fail(ErrorKind kind, const char* why) {
  if (failure_exchanged) return;
  failure_exchanged = true;
  failure_unsent = !send(wire::Notice::failed(kind, why));
  comm->set_failure_reason(kind, why);
  comm->set_event(CommEvent::kFailedByMonitor);
}

void LostChannel::drop_attempt(const EventHandler& handler) {
  if (!attempt) return;
  handler.unwatch(attempt.get());
  close_with_reset(attempt);
  resume_sent = false;
}

void LostChannel::drop_offered() {
  if (offered) close_with_reset(offered);
}

ConnectionTable::ConnectionTable(EventHandler::Due attend)
    : handler(
          loop,
          [this](int key) {
            const MutexLock lock(mutex);
            MonitoredConnection* const found = find(key);
            if (found == nullptr) return;
            if (found->lost != nullptr && found->lost->attempt) advance_attempt(*this, *found);
            read_peer_messages(*this, *found);
          },
          std::move(attend)) {}

MonitoredConnection* ConnectionTable::find(int key) {
  const auto found = connections.find(key);
  return found != connections.end() ? &found->second : nullptr;
}

void ConnectionTable::end_loss(MonitoredConnection& connection) {
  if (connection.lost == nullptr) return;
  connection.lost->drop_attempt(handler);
  connection.lost->drop_offered();
  if (connection.lost->reported) --reported_losses;
  connection.lost.reset();
}

void ConnectionTable::forget(MonitoredConnection& connection) {
  handler.unwatch(connection.comm->side_channel().get());
  end_loss(connection);
  if (connection.resumable) {
    // A notice that was sent on a side channel that was lost then did not arrive.
    std::optional<wire::MessageType> last;
    if (!connection.peer_closed) last = connection.closing ? wire::MessageType::kClose : wire::MessageType::kFailed;
    source->remove_connection(connection.end(), last);
    --resumable;
  }
  deadlines.remove(connection);
}

}  // namespace verbatim
