#include "net/monitor/channel_losses.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/socket.h"
#include "net/diagnose/path_facts.h"

namespace verbatim {
namespace {

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

// Many channels are lost together: one warning is enough.
void report_loss(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex) {
  if (connection.closing != nullptr || connection.has_failed()) return;
  if (std::exchange(connection.loss->reported, true)) return;
  const LogLevel level = table.reported_losses++ == 0 ? LogLevel::kWarn : LogLevel::kInfo;
  table.log(level, [&] {
    return "the side channel with the peer " + connection.comm->endpoint().peer_name() + " ended with " +
           std::strerror(connection.loss->error) +
           "; data goes on by RDMA while the peer's NIC answers, and the side channel is made again. Next: look at the "
           "network of the side channels between the hosts (VERBATIM_SOCKET_IFNAME): firewalls, switches";
  });
}

void report_move(ConnectionTable& table, const MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex) {
  const std::optional<Channel::Path> path = connection.comm->channel().path();
  if (!path) return;
  table.log(LogLevel::kInfo, [&] {
    return "the peer " + connection.comm->endpoint().peer_name() +
           " did not answer on the side channel, or a lane there is down; the side channel uses " +
           host_to_string(path->own) + " and " + host_to_string(path->peer) + " now";
  });
}

// Looks for the answer to a probe.
void check_answer(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex) {
  ChannelLoss& loss = *connection.loss;
  const Comm& comm = *connection.comm;
  const bool outstanding = (comm.slow_path_flags() & Comm::kProbing) != 0;
  const std::uint64_t completed = comm.peer_progress() << 32 | comm.status().outstanding;
  const bool completes = std::exchange(loss.completed, completed) != completed;
  if (!outstanding || completes || loss.unanswered_ns == 0) {
    loss.unanswered_ns = outstanding ? now : 0;
    loss.overdue = false;
  }
  if (outstanding && !loss.overdue && now - loss.unanswered_ns >= answer_timeout_ns(comm)) {
    loss.overdue = true;
    loss.polls = comm.polls_without_answer();
  }
  if (comm.probes_answered() != loss.answers || now - loss.since_ns >= kUndecidedNs) report_loss(table, connection);
  const bool decided = (loss.reported || connection.has_failed()) && !outstanding;
  loss.check_ns = decided ? loss.probe_ns : now + kCheckPeriodNs;
}

// The NIC is asked anew after a refusal: that of a process that is being killed may have answered the last probe.
void note_refusals(MonitoredConnection& connection, std::uint64_t now) {
  const unsigned refusals = connection.comm->channel().refusals();
  if (std::exchange(connection.loss->refusals, refusals) == refusals) return;
  connection.loss->probe_ns = std::min(connection.loss->probe_ns, now);
}

// False: the peer process has ended.
bool advance_loss(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex) {
  ChannelLoss& loss = *connection.loss;
  Comm& comm = *connection.comm;
  const bool refused = comm.channel().is_refused();
  note_refusals(connection, now);
  if (now >= loss.probe_ns) {  // the first is sent at once; while data of the peer arrives no other is needed
    const std::uint64_t progress = comm.peer_progress();
    const bool first = loss.probe_ns == loss.since_ns;
    if (std::exchange(connection.peer_progress, progress) == progress || first || refused) {
      comm.set_event(CommEvent::kProbePeer);
    }
    loss.probe_ns = now + kProbePeriodNs;
  }
  if (now >= loss.check_ns) check_answer(table, connection, now);
  return !refused || !loss.overdue || comm.polls_without_answer() - loss.polls < kPollsForAnswer;
}

}  // namespace

bool lose_channel(ConnectionTable& table, MonitoredConnection& connection, int error) {
  table.end_loss(connection);
  Comm& comm = *connection.comm;
  const std::uint64_t now = monotonic_ns();
  connection.loss.reset(new (std::nothrow) ChannelLoss);
  if (connection.loss == nullptr || !comm.channel().lose(now)) {
    table.end_loss(connection);
    return false;
  }
  ChannelLoss& loss = *connection.loss;
  loss.error = error;
  loss.answers = comm.probes_answered();
  loss.since_ns = loss.check_ns = loss.probe_ns = now;
  comm.set_channel(ChannelState::kLost, static_cast<std::uint32_t>(error));
  return true;
}

void channel_changed(ConnectionTable& table, MonitoredConnection& connection, Channel::Change change) {
  if (change == Channel::Change::kNone) return;
  if (change == Channel::Change::kBroken) return static_cast<void>(lose_channel(table, connection, ENOMEM));
  connection.ticks_without_message = 0;
  connection.no_answer = false;
  connection.comm->clear_event(CommEvent::kProbePeer);
  connection.comm->set_channel(ChannelState::kOpen);
  if (change == Channel::Change::kMoved) return report_move(table, connection);
  if (connection.loss == nullptr) return;
  report_loss(table, connection);
  const bool reported = connection.loss->reported;
  const std::uint64_t lost_ns = monotonic_ns() - connection.loss->since_ns;
  table.end_loss(connection);
  if (!reported) return;
  table.log(LogLevel::kInfo, [&] {
    return "the side channel with the peer " + connection.comm->endpoint().peer_name() + " is back after " +
           to_seconds(lost_ns);
  });
}

void continue_channel(ConnectionTable& table, MonitoredConnection& connection) {
  Channel& channel = connection.comm->channel();
  if (channel.is_being_made()) channel_changed(table, connection, channel.ready(monotonic_ns()));
}

bool advance_channel(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) {
  Channel& channel = connection.comm->channel();
  if (connection.loss != nullptr && !advance_loss(table, connection, now)) return false;
  if (connection.has_failed()) channel.limit_attempts();
  channel_changed(table, connection, channel.advance(now));
  if (connection.loss != nullptr) note_refusals(connection, now);
  return true;
}

}  // namespace verbatim
