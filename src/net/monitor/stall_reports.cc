#include "net/monitor/stall_reports.h"

#include <optional>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/log.h"
#include "net/diagnose/failure.h"
#include "net/monitor/device_calls.h"

namespace verbatim {
namespace {

// For so long a cause is a warning once for each peer process.
constexpr std::uint64_t kOtherConnectionsNs = 5 * kNanosecondsPerSecond;

// As arguments of grep: the device of the QP that has work outstanding, else all devices of the connection.
std::string grep_arguments(const Endpoint& endpoint, std::optional<std::size_t> qp) {
  const std::span<const Port* const> ports = endpoint.ports();
  if (qp || ports.size() == 1) return ports[qp ? endpoint.qps()[*qp].device : 0]->device->name();
  std::string arguments;
  for (const Port* port : ports) arguments.append(arguments.empty() ? "-e " : " -e ").append(port->device->name());
  return arguments;
}

// After how long without progress the peer is asked whether it has the CTS entries; 0: never. With one lane only if the
// application may make no calls, which would find that the entries were lost.
std::uint64_t suspect_ns(const Comm& comm, const wire::ConnectionStatus& status) {
  if (comm.kind() == CommKind::kSend || !comm.can_wait()) return 0;
  if (!comm.can_lose_lanes() && (status.flags & wire::ConnectionStatus::kOptionalReceives) == 0) return 0;
  return comm.settings().config.lane_timeout_ms * kNanosecondsPerMillisecond;
}

void check_connection(const StallSettings& settings, ConnectionTable& table, MonitoredConnection& connection,
                      std::uint64_t now) VERBATIM_REQUIRES(table.mutex) {
  using Action = StallDetector::Action;
  Comm& comm = *connection.comm;
  StallDetector& detector = connection.stall_detector;
  const Comm::Activity activity = comm.take_activity();
  const wire::ConnectionStatus status = comm.status();
  // The next call ends receives when the peer has ended, and sends unless it has closed. Flushes go on.
  const bool sends = comm.kind() == CommKind::kSend &&
                     (comm.slow_path_flags() & static_cast<std::uint32_t>(CommEvent::kPeerClosed)) != 0;
  if (connection.peer_closed && !sends && status.flushes == 0) return;
  const Action action =
      detector.check(settings, now, status, activity.send_refused, activity.tested, suspect_ns(comm, status));
  if (action == Action::kNone) return;
  if (action == Action::kSuspectCts) return comm.suspect_cts();
  if (action == Action::kQuery) {
    connection.send(wire::Notice::status_query(detector.query_id()));
    return DeviceCalls::request_qp_state(table, connection, now);
  }
  const Endpoint& endpoint = comm.endpoint();
  if (action == Action::kRecovered) {
    return table.log(LogLevel::kInfo, [&] {
      return "the connection with the peer " + endpoint.peer_name() + " makes progress again, after " +
             to_seconds(detector.last_stall_ns());
    });
  }
  if (comm.lane_wait() == LaneWait::kForLane) {  // its line says why nothing happens
    if (action != Action::kFail) return;
    return connection.fail(ErrorKind::kRemote,
                           ("stalled for " + to_seconds(detector.stalled_ns(now)) +
                            " (VERBATIM_STALL_FAIL_S): no lane to the peer " + endpoint.peer_name() + " works")
                               .c_str());
  }
  const std::optional<std::size_t> busiest_qp = comm.busiest_qp();
  const Diagnosis stall = diagnose_stall(detector.cause(), endpoint.peer_name(), grep_arguments(endpoint, busiest_qp),
                                         connection.comm->channel().is_being_made());
  const std::string stalled = "stalled for " + to_seconds(detector.stalled_ns(now));
  if (action == Action::kFail) {
    return connection.fail(is_local(detector.cause()) ? ErrorKind::kSystem : ErrorKind::kRemote,
                           (stalled + " (VERBATIM_STALL_FAIL_S): " + stall.why).c_str());
  }
  // Its other connections mostly stall for the same reason.
  ConnectionTable::StalledPeer& known = table.stalled_peers[{comm.kind(), endpoint.peer_name()}];
  const bool is_known = known.cause == detector.cause() && now < known.known_until_ns;
  if (!is_known) known = {detector.cause(), now + kOtherConnectionsNs};
  table.log(is_known ? LogLevel::kInfo : LogLevel::kWarn, [&] {
    return stalled + ": " + stall.why + "; local: " + describe_status(connection.status(now)) + "; peer: " +
           (detector.peer()          ? describe_status(*detector.peer())
            : connection.peer_closed ? "closed"
                                     : "no answer") +
           kNextStep + stall.next + ". Path: " + comm.describe_path(busiest_qp.value_or(0));
  });
}

}  // namespace

void StallReports::check(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) const {
  if (now < connection.stall_check_ns || connection.has_failed()) return;
  const bool waits = connection.awaits_qp_state(now);  // DeviceCalls makes a check due
  try {
    if (!waits) check_connection(settings_, table, connection, now);
  } catch (...) {  // a stall that is to end the connection is found again
    VERBATIM_WARN("no memory to describe the stall with %s", connection.comm->endpoint().peer_name().c_str());
  }
  const bool busy = waits || connection.stall_detector.has_outstanding();
  connection.stall_check_ns = busy ? next_multiple(now, settings_.busy_period_ns()) : next_idle_check_ns(now);
}

}  // namespace verbatim
