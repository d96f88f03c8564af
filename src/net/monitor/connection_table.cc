#include "net/monitor/connection_table.h"

#include <utility>

#include "net/monitor/channel_losses.h"
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
  return {{remote.listen, remote.attempt}, comm->kind() == CommKind::kSend ? 1U : 0U};
}

void MonitoredConnection::exchange_failure(const wire::Notice& notice) {
  failure_exchanged = true;
  failure_sent = send(notice);
  failure_waits = !failure_sent;
}

void MonitoredConnection::send_failure_notice() {
  if ((failure_exchanged && !failure_waits) || peer_closed) return;
  const std::string* text = comm->failure_text();
  const wire::Notice notice =
      text != nullptr ? wire::Notice::failed(comm->error()->kind, *text) : wire::Notice::failed(ErrorKind::kNone, "");
  exchange_failure(notice);
}

void MonitoredConnection::fail(ErrorKind kind, const char* why) {
  if (failure_exchanged) return;
  exchange_failure(wire::Notice::failed(kind, why));
  comm->set_failure_reason(kind, why);
  comm->set_event(CommEvent::kFailedByMonitor);
}

ConnectionTable::ConnectionTable(EventHandler::Due attend)
    : handler(
          loop,
          [this](int key) {
            const MutexLock lock(mutex);
            MonitoredConnection* const found = find(key);
            if (found == nullptr) return;
            continue_channel(*this, *found);
            read_peer_messages(*this, *found);
          },
          std::move(attend)) {}

MonitoredConnection* ConnectionTable::find(int key) {
  const auto found = connections.find(key);
  return found != connections.end() ? &found->second : nullptr;
}

void ConnectionTable::end_loss(MonitoredConnection& connection) {
  if (connection.loss == nullptr) return;
  if (connection.loss->reported) --reported_losses;
  connection.loss.reset();
}

void ConnectionTable::stop_channel(MonitoredConnection& connection) {
  connection.comm->channel().stop();
  end_loss(connection);
}

void ConnectionTable::forget(MonitoredConnection& connection) {
  stop_channel(connection);
  if (connection.resumable) {
    // A notice that was sent on a side channel that was lost then may not have arrived.
    std::optional<wire::MessageType> last;
    if (!connection.peer_closed) last = connection.closing ? wire::MessageType::kClose : wire::MessageType::kFailed;
    listener->remove_connection(connection.end(), connection.comm->channel().session(), last);
  }
  deadlines.remove(connection);
}

}  // namespace verbatim
