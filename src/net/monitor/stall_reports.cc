#include "net/monitor/stall_reports.h"

#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "net/diagnose/failure.h"
#include "net/monitor/device_calls.h"

namespace verbatim {
namespace {

struct Report {
  LogLevel level;
  std::string text;
};

void check_connection(const StallSettings& settings, MonitoredConnection& connection, std::uint64_t now,
                      std::vector<Report>& reports) {
  using Action = StallDetector::Action;
  Comm& comm = *connection.comm;
  StallDetector& detector = connection.stall_detector;
  const Comm::Activity activity = comm.take_activity();
  const Action action = detector.check(settings, now, comm.status(), activity.send_refused, activity.tested);
  if (action == Action::kNone) return;
  if (action == Action::kQuery) {
    connection.send(wire::Notice::status_query(detector.query_id()));
    return DeviceCalls::request_qp_state(connection, now);
  }
  const Endpoint& endpoint = comm.endpoint();
  if (action == Action::kRecovered) {
    reports.push_back({LogLevel::kInfo, "the connection with the peer " + endpoint.peer_name() +
                                            " makes progress again, after " + to_seconds(detector.last_stall_ns())});
    return;
  }
  const Diagnosis stall =
      diagnose_stall(detector.cause(), endpoint.peer_name(), endpoint.ports().front()->device->name());
  const std::string stalled = "stalled for " + to_seconds(detector.stalled_ns(now));
  if (action == Action::kFail) {
    return connection.fail(is_local(detector.cause()) ? ErrorKind::kSystem : ErrorKind::kRemote,
                           (stalled + " (VERBATIM_STALL_FAIL_S): " + stall.why).c_str());
  }
  reports.push_back(
      {LogLevel::kWarn, stalled + ": " + stall.why + "; local: " + describe_status(connection.status(now)) +
                            "; peer: " + (detector.peer() ? describe_status(*detector.peer()) : "no answer") +
                            kNextStep + stall.next + ". Path: " + comm.describe_path(0)});
}

}  // namespace

void StallReports::check(ConnectionTable& table) {
  std::vector<Report> reports;
  {
    const MutexLock lock(table.mutex);
    const std::uint64_t now = monotonic_ns();
    if (std::exchange(table.stall_check_due, false)) next_check_ns_ = 0;
    if (now < next_check_ns_) return;
    bool any_outstanding = false;
    for (auto& [fd, connection] : table.connections) {
      if (connection.closing != nullptr || connection.peer_closed || connection.failure_exchanged) continue;
      const bool waits = connection.awaits_qp_state(now);  // DeviceCalls makes a check due
      try {
        if (!waits) check_connection(settings_, connection, now, reports);
      } catch (...) {  // a stall that is to end the connection is found again
        VERBATIM_WARN("no memory to describe the stall with %s", connection.comm->endpoint().peer_name().c_str());
      }
      any_outstanding = any_outstanding || waits || connection.stall_detector.has_outstanding();
    }
    next_check_ns_ = now + (any_outstanding ? settings_.busy_period_ns() : settings_.idle_period_ns());
  }
  for (const Report& report : reports) log_line(report.level, __FILE__, __LINE__, "%s", report.text.c_str());
}

}  // namespace verbatim
