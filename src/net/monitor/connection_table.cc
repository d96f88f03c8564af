#include "net/monitor/connection_table.h"

#include <utility>

#include "base/clock.h"

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

void MonitoredConnection::send_failure_notice() {
  if (failure_exchanged || peer_closed) return;
  const std::string* text = comm->failure_text();
  const wire::Notice notice =
      text != nullptr ? wire::Notice::failed(comm->error()->kind, *text) : wire::Notice::failed(ErrorKind::kNone, "");
  failure_exchanged = send(notice);
}

void MonitoredConnection::fail(ErrorKind kind, const char* why) {
  if (failure_exchanged) return;
  failure_exchanged = true;
  send(wire::Notice::failed(kind, why));
  comm->set_failure_reason(kind, why);
  comm->set_signal(CommSignal::kFailedByMonitor);
}

void ConnectionTable::set_deadline(MonitoredConnection& connection, std::uint64_t deadline_ns) {
  if (connection.deadline->first == deadline_ns) return;
  Deadlines::node_type entry = deadlines.extract(connection.deadline);
  entry.key() = deadline_ns;
  connection.deadline = deadlines.insert(std::move(entry));
}

}  // namespace verbatim
