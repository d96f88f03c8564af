#include "net/monitor/stall_reports.h"

#include <cstdio>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/diagnose/failure.h"
#include "net/monitor/device_calls.h"
#include "net/transfer/comm.h"

namespace verbatim {
namespace {

double seconds(std::uint64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / static_cast<double>(kNanosecondsPerSecond);
}

}  // namespace

struct StallReports::Report {
  LogLevel level = LogLevel::kWarn;
  char text[1400];
};

void StallReports::check(ConnectionTable& table) {
  Report report;
  while (find_report(table, report)) {
    log_line(report.level, __FILE__, __LINE__, "%s", report.text);
  }
}

bool StallReports::find_report(ConnectionTable& table, Report& report) {
  const MutexLock lock(table.mutex);
  const std::uint64_t now = monotonic_ns();
  if (std::exchange(table.stall_check_due, false)) next_check_ns_ = 0;
  if (now < next_check_ns_) return false;
  for (auto at = table.connections.upper_bound(last_fd_); at != table.connections.end(); ++at) {
    last_fd_ = at->first;
    MonitoredConnection& connection = at->second;
    if (connection.closing != nullptr || connection.peer_closed || connection.failure_exchanged) continue;
    if (connection.awaits_qp_state(now)) {  // DeviceCalls makes a check due
      any_outstanding_ = true;
      continue;
    }
    if (check_connection(connection, now, report)) return true;
  }
  last_fd_ = -1;
  next_check_ns_ = now + (any_outstanding_ ? settings_.busy_period_ns() : settings_.idle_period_ns());
  any_outstanding_ = false;
  return false;
}

bool StallReports::check_connection(MonitoredConnection& connection, std::uint64_t now, Report& report) {
  Comm& comm = *connection.comm;
  StallDetector& detector = connection.stall_detector;
  const Comm::Activity activity = comm.take_activity();
  const StallDetector::Action action =
      detector.check(settings_, now, comm.status(), activity.send_refused, activity.tested);
  any_outstanding_ = any_outstanding_ || detector.has_outstanding();
  const PeerName peer(comm);
  char cause[320];
  switch (action) {
    case StallDetector::Action::kNone:
      return false;
    case StallDetector::Action::kQuery:
      connection.channel.send(comm.side_channel(), wire::Notice::status_query(detector.query_id()));
      DeviceCalls::request_qp_state(connection, now);
      return false;
    case StallDetector::Action::kRecovered:
      report.level = LogLevel::kInfo;
      std::snprintf(report.text, sizeof report.text,
                    "the connection with the peer %s makes progress again, after %.1f s", peer.text,
                    seconds(detector.last_stall_ns()));
      return true;
    case StallDetector::Action::kFail: {
      describe_stall_cause(detector.cause(), peer.text, cause);
      char why[512];
      std::snprintf(why, sizeof why, "stalled for %.1f s (VERBATIM_STALL_FAIL_S): %s",
                    seconds(detector.stalled_ns(now)), cause);
      connection.fail(is_local(detector.cause()) ? ErrorKind::kSystem : ErrorKind::kRemote, why);
      return false;
    }
    case StallDetector::Action::kReport:
      break;
  }
  describe_stall_cause(detector.cause(), peer.text, cause);
  char local[256];
  char remote[256] = "no answer";
  describe_status(connection.status(now), local);
  if (detector.peer()) describe_status(*detector.peer(), remote);
  char next[256];
  const Device& device = *comm.endpoint().ports().front()->device;
  describe_next_step(detector.cause(), peer.text, device.name().c_str(), next);
  std::string path;
  try {
    path = comm.describe_path(0);
  } catch (...) {  // out of memory: the line has no path
  }
  report.level = LogLevel::kWarn;
  std::snprintf(report.text, sizeof report.text, "stalled for %.1f s: %s; local: %s; peer: %s%s%s. Path: %s",
                seconds(detector.stalled_ns(now)), cause, local, remote, kNextStep, next, path.c_str());
  return true;
}

}  // namespace verbatim
