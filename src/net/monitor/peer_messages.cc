#include "net/monitor/peer_messages.h"

#include <cerrno>
#include <cstdio>

#include "base/clock.h"
#include "net/monitor/channel_losses.h"
#include "net/monitor/device_calls.h"
#include "net/monitor/keepalive.h"

namespace verbatim {
namespace {

// Then other connections are served: a peer may send faster than this thread reads.
constexpr int kMaxMessagesPerRead = 16;

// An end of file means that the peer process has ended. Another error may be the network's alone.
void handle_channel_error(ConnectionTable& table, MonitoredConnection& connection, int error)
    VERBATIM_REQUIRES(table.mutex) {
  // The notice of this end's failure may have been lost with the TCP connection.
  const bool goes_on =
      !connection.has_failed() || (connection.failure_sent && connection.comm->channel().unacknowledged() != 0);
  if (error != 0 && goes_on && lose_channel(table, connection, error)) return;
  handle_peer_end(table, connection, CommEvent::kPeerDisconnected);
}

// The bytes that follow cannot be divided into messages: the side channel is read no more.
void handle_protocol_error(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex) {
  char why[192];
  std::snprintf(why, sizeof why,
                "the peer %s sent an unknown message on the side channel: another version of the plugin?",
                connection.comm->endpoint().peer_name().c_str());
  connection.fail(ErrorKind::kRemote, why);
  handle_peer_end(table, connection, CommEvent::kPeerDisconnected);
}

void handle_failure_notice(MonitoredConnection& connection, const wire::FailureNotice& failed) {
  if (connection.failure_exchanged) return;
  connection.failure_exchanged = true;
  Comm& comm = *connection.comm;
  if (failed.kind == ErrorKind::kNone) return comm.set_event(CommEvent::kPeerAborted);
  char why[wire::kMaxFailureText + 128];
  std::snprintf(why, sizeof why, "the peer %s reported: %.*s", comm.endpoint().peer_name().c_str(),
                static_cast<int>(failed.text.size()), failed.text.data());
  comm.set_failure_reason(ErrorKind::kRemote, why);
  comm.set_event(CommEvent::kPeerFailed);
}

void handle(ConnectionTable& table, MonitoredConnection& connection, const Channel::Message& message)
    VERBATIM_REQUIRES(table.mutex) {
  switch (message.type) {
    case wire::MessageType::kClose:
      return handle_peer_end(table, connection, CommEvent::kPeerClosed);
    case wire::MessageType::kPing:
    case wire::MessageType::kPong:
    case wire::MessageType::kAck:
      return;  // the channel's own
    case wire::MessageType::kStatusQuery:
      connection.unanswered_query = wire::decode<std::uint32_t>(message.body);
      if ((connection.query_is_new = connection.unanswered_query.has_value())) return;
      break;
    case wire::MessageType::kStatusReply:
      if (const std::optional<wire::ConnectionStatus> status = wire::decode_status_reply(message.body)) {
        if (connection.stall_detector.accept_reply(*status)) connection.stall_check_ns = 0;
        return;
      }
      break;
    case wire::MessageType::kFailed:
      if (const std::optional<wire::FailureNotice> failed = wire::decode_failure(message.body)) {
        return handle_failure_notice(connection, *failed);
      }
      break;
    case wire::MessageType::kLaneDown:
      if (const std::optional<wire::LaneDown> down = wire::decode<wire::LaneDown>(message.body)) {
        if (connection.comm->receive_lane_down(*down)) return;
      }
      break;
    case wire::MessageType::kLaneFenced:
      if (const std::optional<wire::LaneReport> report = wire::decode_lane_fenced(message.body)) {
        if (connection.comm->receive_lane_report(*report)) return;
      }
      break;
    case wire::MessageType::kLaneOffer:
    case wire::MessageType::kLaneAnswer:
      if (const std::optional<wire::LaneAddress> address = wire::decode_lane_address(message.body)) {
        if (connection.comm->receive_lane_address(message.type, *address)) return;
      }
      break;
    default:
      break;
  }
  handle_protocol_error(table, connection);
}

}  // namespace

void handle_peer_end(ConnectionTable& table, MonitoredConnection& connection, CommEvent event) {
  table.stop_channel(connection);
  connection.peer_closed = true;
  connection.comm->set_event(event);
}

void read_peer_messages(ConnectionTable& table, MonitoredConnection& connection) {
  table.mark_changed(connection);
  Channel& channel = connection.comm->channel();
  if (!channel.is_open()) return;
  for (int i = 0; i < kMaxMessagesPerRead && !connection.peer_closed; ++i) {
    const Result<std::optional<Channel::Message>> message = channel.receive();
    if (!message && message.error().sys_errno == EPROTO) return handle_protocol_error(table, connection);
    if (!message) return handle_channel_error(table, connection, message.error().sys_errno);
    if (!*message) return;
    connection.ticks_without_message = 0;
    if (connection.no_answer) handle_answer(table, connection);
    handle(table, connection, **message);
  }
}

void send_due_messages(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) {
  connection.lanes_change = connection.comm->advance_lanes_for_idle() && !connection.peer_closed;
  Channel& channel = connection.comm->channel();
  bool sent = false;
  while (channel.is_open() && connection.comm->has_lane_notice() && channel.has_room()) {
    if (const std::optional<wire::Notice> notice = connection.comm->take_lane_notice()) sent = channel.send(*notice);
  }
  if (sent) {
    const std::optional<Channel::Path> path = channel.path();
    channel.ask_for_answer(
        now, path && connection.comm->has_lane_down(wire::to_address(path->own).ip, wire::to_address(path->peer).ip));
  }
  if (connection.comm->failure_text() != nullptr) connection.send_failure_notice();
  if (std::exchange(connection.query_is_new, false)) DeviceCalls::request_qp_state(table, connection, now);
  if (!connection.unanswered_query || connection.awaits_qp_state(now)) return;
  wire::ConnectionStatus status = connection.status(now);
  status.id = *connection.unanswered_query;
  connection.unanswered_query.reset();
  connection.send(wire::Notice::status_reply(status));
}

}  // namespace verbatim
