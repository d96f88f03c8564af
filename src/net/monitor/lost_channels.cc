#include "net/monitor/lost_channels.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/socket.h"
#include "net/diagnose/path_facts.h"
#include "net/monitor/channel_targets.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kAttemptTimeoutNs = 5 * kNanosecondsPerSecond;
// Of the first attempt at each of several addresses.
constexpr std::uint64_t kFirstAttemptTimeoutNs = 250 * kNanosecondsPerMillisecond;
// After an error the connecting side begins at once, the other one after this time.
constexpr std::uint64_t kAcceptingSideWaitsNs = 50 * kNanosecondsPerMillisecond;
// The peer's monitor answers a ping at once, whatever its application does. If it takes longer than this, the side
// channel is made again, also if the peer was only slow: then nothing is lost.
constexpr std::uint64_t kAnswerNs = 100 * kNanosecondsPerMillisecond;
// For so long the connecting side prefers its own attempt to one of the peer, if both ends make one. If the peer has
// not answered then, another host has the address that it tries.
constexpr std::uint64_t kPrefersOwnNs = 5 * kNanosecondsPerMillisecond;
// A side channel that is as new as this is not replaced because of the lanes that are down.
constexpr std::uint64_t kNewChannelNs = kNanosecondsPerSecond;
constexpr std::uint64_t kFirstPauseNs = 100 * kNanosecondsPerMillisecond;
constexpr unsigned kMaxDoublings = 7;  // 12.8 s
// Of a comm that has failed, to report its failure; they take 25 s or more. The peer may have ended.
constexpr unsigned kAttemptsOfFailed = 9;
constexpr std::uint64_t kProbePeriodNs = 10 * kNanosecondsPerSecond;
constexpr std::uint64_t kCheckPeriodNs = 250 * kNanosecondsPerMillisecond;
// Longer than the end of a process takes to be known, with the default settings: that alone is reported then.
constexpr std::uint64_t kUndecidedNs = 15 * kNanosecondsPerSecond;
// An answer is overdue after this time, or after two timeouts of the transport if that is longer: a lost packet is sent
// again after one.
constexpr std::uint64_t kMinAnswerNs = 2 * kNanosecondsPerSecond;
constexpr std::uint64_t kAckTimeoutUnitNs = 4096;
// One poll may have begun before the answer was overdue.
constexpr std::uint32_t kPollsForAnswer = 2;

std::uint64_t answer_timeout_ns(const Comm& comm) {
  const unsigned timeout = comm.settings().config.timeout;
  return timeout == 0 ? kNever : std::max(kMinAnswerNs, 2 * (kAckTimeoutUnitNs << timeout));  // 0: no timeout
}

// After an attempt at the last address. Connections that are lost together do not try again together.
std::uint64_t pause_ns(const MonitoredConnection& connection) {
  const LostChannel& lost = *connection.lost;
  if ((lost.failed_attempts + 1) % lost.target_count != 0) return 0;
  const std::uint64_t pause = kFirstPauseNs << std::min(lost.failed_attempts / lost.target_count, kMaxDoublings);
  return pause + pause / 8 * (static_cast<unsigned>(connection.comm->side_channel().get()) % 8);
}

void give_up_attempt(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex) {
  connection.lost->drop_attempt(table.handler);
  connection.lost->attempt_ns = now + pause_ns(connection);
  ++connection.lost->failed_attempts;
  if (connection.lost->comm_failed &&
      connection.lost->failed_attempts >= kAttemptsOfFailed * connection.lost->target_count) {
    connection.lost->attempt_ns = kNever;
  }
}

// The NIC is asked anew after a refusal: that of a process that is being killed may have answered the last probe.
void set_refused(LostChannel& lost, bool refused, std::uint64_t now) {
  if (lost.moves) return;  // the old side channel tells how the peer is
  lost.refused = refused;
  if (refused) lost.probe_ns = std::min(lost.probe_ns, now);
}

template <typename SocketAddress>
sockaddr_storage widen(const SocketAddress& address) {
  sockaddr_storage wide{};
  std::memcpy(&wide, &address, sizeof address);
  return wide;
}

bool is_connecting(const MonitoredConnection& connection) {
  return connection.comm->kind() == CommKind::kSend;
}

void begin_attempt(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex) {
  LostChannel& lost = *connection.lost;
  const sockaddr_storage target = wire::to_sockaddr(target_of(lost));
  Result<UniqueFd> socket = tcp_connect(target, source_of(table, connection, target));
  if (is_peers_for_sure(connection)) {
    set_refused(lost, !socket && socket.error().sys_errno == ECONNREFUSED, now);
  }
  if (!socket) return give_up_attempt(table, connection, now);
  lost.attempt = std::move(*socket);
  const bool is_short = lost.target_count > 1 && lost.failed_attempts < lost.target_count;
  lost.attempt_ns = now + (is_short ? kFirstAttemptTimeoutNs : kAttemptTimeoutNs);
  const int key = connection.comm->side_channel().get();
  if (!table.handler.watch(connection.lost->attempt.get(), EventHandler::kWritableOnce, key)) {
    give_up_attempt(table, connection, now);
  }
}

void set_reset_on_close(const UniqueFd& socket, bool resets = true) {
  const linger option{.l_onoff = resets ? 1 : 0, .l_linger = 0};
  static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &option, sizeof option));
}

// From how many bytes on epoll reports the socket as readable.
void set_low_water(const UniqueFd& socket, int bytes) {
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

// The peer's first message shows that it has accepted the side channel, or that it has ended the connection. It stays
// in the socket.
enum class Answer : std::uint8_t { kNone, kAccepted, kOther };
Answer read_answer(const UniqueFd& socket) {
  std::uint8_t bytes[wire::kHeaderBytes];
  const ssize_t count = ::recv(socket.get(), bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return Answer::kNone;
  if (count > 0 && count < static_cast<ssize_t>(sizeof bytes)) return Answer::kNone;
  if (count != static_cast<ssize_t>(sizeof bytes)) return Answer::kOther;
  const Result<wire::Header> header = wire::decode_header(bytes);
  if (!header) return Answer::kOther;
  const wire::MessageType type = header->type;
  const bool known =
      type == wire::MessageType::kPing || type == wire::MessageType::kClose || type == wire::MessageType::kFailed;
  return known ? Answer::kAccepted : Answer::kOther;
}

// Many channels are lost together: one warning is enough.
void report_loss(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex) {
  if (connection.closing != nullptr || std::exchange(connection.lost->reported, true)) return;
  const LogLevel level = table.reported_losses++ == 0 ? LogLevel::kWarn : LogLevel::kInfo;
  table.log(level, [&] {
    return "the side channel with the peer " + connection.comm->endpoint().peer_name() + " ended with " +
           std::strerror(connection.lost->error) +
           "; data goes on by RDMA while the peer's NIC answers, and the side channel is made again. Next: look at the "
           "network of the side channels between the hosts (VERBATIM_SOCKET_IFNAME): firewalls, switches";
  });
}

void report_move(ConnectionTable& table, const MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex) {
  if (connection.addresses == nullptr) return;
  table.log(LogLevel::kInfo, [&] {
    return "the peer " + connection.comm->endpoint().peer_name() +
           " did not answer on the side channel, or a lane there is down; the side channel uses " +
           host_to_string(widen(connection.addresses->own)) + " and " +
           host_to_string(widen(connection.addresses->peer)) + " now";
  });
}

// Looks for the answer to a probe.
void check_answer(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex) {
  LostChannel& lost = *connection.lost;
  const Comm& comm = *connection.comm;
  const bool outstanding = (comm.slow_path_flags() & Comm::kProbing) != 0;
  const std::uint64_t completed = comm.peer_progress() << 32 | comm.status().outstanding;
  const bool completes = std::exchange(lost.completed, completed) != completed;
  if (!outstanding || completes || lost.unanswered_ns == 0) {
    lost.unanswered_ns = outstanding ? now : 0;
    lost.overdue = false;
  }
  if (outstanding && !lost.overdue && now - lost.unanswered_ns >= answer_timeout_ns(comm)) {
    lost.overdue = true;
    lost.polls = comm.polls_without_answer();
  }
  if (comm.probes_answered() != lost.answers || now - lost.since_ns >= kUndecidedNs) report_loss(table, connection);
  const bool decided = lost.reported && !outstanding;
  lost.check_ns = decided ? lost.probe_ns : now + kCheckPeriodNs;
}

bool begin_loss(MonitoredConnection& connection, int error, bool moves) {
  connection.lost.reset(new (std::nothrow) LostChannel);
  if (connection.lost == nullptr) return false;
  LostChannel& lost = *connection.lost;
  lost.error = error;
  lost.moves = moves;
  find_targets(connection, lost);
  lost.answers = connection.comm->probes_answered();
  lost.since_ns = monotonic_ns();
  // While it moves, the old one tells how the peer is.
  lost.check_ns = lost.probe_ns = moves ? kNever : lost.since_ns;
  lost.attempt_ns = lost.since_ns + (moves || is_connecting(connection) ? 0 : kAcceptingSideWaitsNs);
  if (lost.target_count == 0) lost.attempt_ns = kNever;
  connection.answer_due_ns = 0;
  return true;
}

// Puts the socket in the place of the side channel, whose descriptor number stays the same: the table and the comm know
// the connection by it.
bool replace_channel(ConnectionTable& table, MonitoredConnection& connection, UniqueFd socket, bool dialed)
    VERBATIM_REQUIRES(table.mutex) {
  const int fd = connection.comm->side_channel().get();
  table.handler.unwatch(fd);
  table.handler.unwatch(socket.get());
  set_low_water(socket, 1);
  // The old one, or the new one if a call fails, ends with a reset: an end of file is the end of the process.
  set_reset_on_close(connection.comm->side_channel());
  set_reset_on_close(socket);
  if (::dup3(socket.get(), fd, O_CLOEXEC) < 0) return false;
  if (!table.handler.watch(fd, EventHandler::kReadable, fd)) return false;
  set_reset_on_close(connection.comm->side_channel(), false);
  connection.channel.reset();
  connection.dialed = dialed;
  connection.pings_sent = connection.pongs_received = 0;
  // What was sent before may not have arrived. The peer ignores repeats.
  if (connection.failure_exchanged) connection.failure_unsent = true;
  connection.close_sent = false;
  connection.ticks_without_message = 0;
  connection.no_answer = false;
  connection.comm->clear_event(CommEvent::kProbePeer);
  connection.comm->set_channel(ChannelState::kOpen);
  connection.comm->send_lane_notices_again();
  connection.find_addresses();
  connection.answer_due_ns = 0;
  connection.channel_since_ns = monotonic_ns();
  if (connection.lost == nullptr) return true;
  if (connection.lost->moves) {
    table.end_loss(connection);
    report_move(table, connection);
    return true;
  }
  report_loss(table, connection);
  const bool reported = connection.lost->reported;
  const std::uint64_t lost_ns = monotonic_ns() - connection.lost->since_ns;
  table.end_loss(connection);
  if (!reported) return true;
  table.log(LogLevel::kInfo, [&] {
    return "the side channel with the peer " + connection.comm->endpoint().peer_name() + " is back after " +
           to_seconds(lost_ns);
  });
  return true;
}

// A side channel that the peer has made.
void use_channel(ConnectionTable& table, MonitoredConnection& connection, UniqueFd socket)
    VERBATIM_REQUIRES(table.mutex) {
  if (!replace_channel(table, connection, std::move(socket), false)) {
    if (connection.lost == nullptr) static_cast<void>(lose_channel(table, connection, ENOMEM));
    return;
  }
  connection.send_ping();
}

}  // namespace

bool lose_channel(ConnectionTable& table, MonitoredConnection& connection, int error) {
  table.end_loss(connection);  // it may have been moving
  if (!begin_loss(connection, error, false)) return false;
  table.handler.unwatch(connection.comm->side_channel().get());
  connection.channel.reset();
  connection.close_sent = false;  // it may not have arrived
  connection.comm->set_channel(ChannelState::kLost, static_cast<std::uint32_t>(error));
  return true;
}

void ask_for_answer(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) {
  if (connection.answer_due_ns != 0 || connection.lost != nullptr || !has_other_path(table, connection)) return;
  connection.send_ping();
  connection.awaited_pongs = connection.pings_sent;
  const bool is_new = connection.channel_since_ns != 0 && now - connection.channel_since_ns < kNewChannelNs;
  const bool is_down = !is_new && connection.addresses != nullptr &&
                       connection.comm->has_lane_down(wire::to_address(widen(connection.addresses->own)).ip,
                                                      wire::to_address(widen(connection.addresses->peer)).ip);
  connection.answer_due_ns = is_down ? now : now + kAnswerNs;
}

void receive_pong(ConnectionTable& table, MonitoredConnection& connection) {
  ++connection.pongs_received;
  if (static_cast<std::int32_t>(connection.pongs_received - connection.awaited_pongs) < 0) return;
  connection.answer_due_ns = 0;
  // Once kResume is sent, the peer may use the new one.
  const bool moves = connection.lost != nullptr && connection.lost->moves;
  if (moves && !connection.lost->resume_sent) table.end_loss(connection);
}

std::uint64_t expect_answer(MonitoredConnection& connection, std::uint64_t now) {
  if (connection.answer_due_ns == 0 || connection.lost != nullptr || connection.peer_closed) return kNever;
  if (now < connection.answer_due_ns) return connection.answer_due_ns;
  return begin_loss(connection, ENETDOWN, true) ? connection.lost->attempt_ns : kNever;
}

bool advance_lost_channel(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) {
  LostChannel& lost = *connection.lost;
  if (now >= lost.probe_ns) {  // the first is sent at once; while data of the peer arrives no other is needed
    const std::uint64_t progress = connection.comm->peer_progress();
    const bool first = lost.probe_ns == lost.since_ns;
    if (std::exchange(connection.peer_progress, progress) == progress || first || lost.refused) {
      connection.comm->set_event(CommEvent::kProbePeer);
    }
    lost.probe_ns = now + kProbePeriodNs;
  }
  if (now >= lost.check_ns) check_answer(table, connection, now);
  const bool unanswered = lost.overdue && connection.comm->polls_without_answer() - lost.polls >= kPollsForAnswer;
  if (lost.refused && unanswered) return false;
  if (connection.comm->failure_text() != nullptr && !std::exchange(lost.comm_failed, true)) lost.failed_attempts = 0;
  if (lost.offered && (now >= lost.offered_ns || !lost.attempt)) {
    UniqueFd offered = std::move(lost.offered);
    if (is_established(offered)) {
      use_channel(table, connection, std::move(offered));
      return true;
    }
    close_with_reset(offered);
  }
  if (now < lost.attempt_ns) return true;
  if (lost.attempt) {
    give_up_attempt(table, connection, now);
  } else {
    begin_attempt(table, connection, now);
  }
  return true;
}

void advance_attempt(ConnectionTable& table, MonitoredConnection& connection) {
  table.mark_changed(connection);
  if (connection.lost == nullptr || !connection.lost->attempt) return;
  LostChannel& lost = *connection.lost;
  const int key = connection.comm->side_channel().get();
  if (!lost.resume_sent) {
    const Result<bool> connected = tcp_connected(lost.attempt);
    if (is_peers_for_sure(connection)) {
      set_refused(lost, !connected && connected.error().sys_errno == ECONNREFUSED, monotonic_ns());
    }
    if (connected && !*connected) {
      if (table.handler.watch(lost.attempt.get(), EventHandler::kWritableOnce, key)) return;
    } else if (connected) {
      const wire::Notice resume = wire::Notice::resume(connection.end().other());
      const std::span<const std::uint8_t> bytes = resume.bytes();
      const ssize_t sent = ::send(lost.attempt.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      lost.resume_sent = sent == static_cast<ssize_t>(bytes.size());
      set_low_water(lost.attempt, wire::kHeaderBytes);
      if (lost.resume_sent && table.handler.watch(lost.attempt.get(), EventHandler::kReadableOnce, key)) return;
    }
    return give_up_attempt(table, connection, monotonic_ns());
  }
  const Answer answer = read_answer(lost.attempt);
  if (answer == Answer::kNone && table.handler.watch(lost.attempt.get(), EventHandler::kReadableOnce, key)) return;
  if (answer == Answer::kAccepted && replace_channel(table, connection, std::move(lost.attempt), true)) return;
  give_up_attempt(table, connection, monotonic_ns());
}

void accept_channel(ConnectionTable& table, MonitoredConnection& connection, UniqueFd socket) {
  if (connection.peer_closed) return;
  if (!is_established(socket)) return close_with_reset(socket);
  table.mark_changed(connection);
  // Both ends make it again. The peer gives up its attempt when it gets this one.
  const bool both = connection.lost != nullptr && connection.lost->resume_sent;
  if (both && is_connecting(connection)) {
    LostChannel& lost = *connection.lost;
    if (!lost.offered) lost.offered_ns = monotonic_ns() + kPrefersOwnNs;
    lost.drop_offered();  // the peer has given that one up
    lost.offered = std::move(socket);
    return;
  }
  use_channel(table, connection, std::move(socket));
}

}  // namespace verbatim
