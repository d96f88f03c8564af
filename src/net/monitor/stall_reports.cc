// How the control thread looks on: stalls, the peers' views, and the state that it gives to whoever asks.
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "net/diagnose/failure.h"
#include "net/monitor/monitor.h"
#include "net/monitor/state_socket.h"
#include "net/transfer/comm.h"

namespace verbatim {
namespace {

double seconds(std::uint64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / static_cast<double>(kNanosecondsPerSecond);
}

}  // namespace

struct Monitor::StallReport {
  LogLevel level = LogLevel::kWarn;
  char text[1000];
};

wire::ConnectionStatus Monitor::connection_status(const Connection& connection, std::uint64_t now) {
  constexpr unsigned kRecentFlags = wire::ConnectionStatus::kSendRefused | wire::ConnectionStatus::kTested;
  const Comm& comm = *connection.comm;
  wire::ConnectionStatus status = comm.status();
  status.flags =
      static_cast<std::uint16_t>(status.flags | (connection.stall_detector.local_status().flags & kRecentFlags));
  if (comm.failure_text() != nullptr) status.flags |= wire::ConnectionStatus::kFailed;
  queried_comm_ = &comm;
  mutex_.unlock();
  const ibv_qp_state state = comm.qp_state();
  mutex_.lock();
  queried_comm_ = nullptr;
  closing_changed_.notify_all();
  status.qp_state = static_cast<std::uint8_t>(state);
  if (connection.stall_detector.has_outstanding()) {
    status.no_progress_ms =
        static_cast<std::uint32_t>(connection.stall_detector.stalled_ns(now) / kNanosecondsPerMillisecond);
  }
  return status;
}

void Monitor::report_stalls() {
  StallReport report;
  while (next_stall_report(report)) {
    log_line(report.level, __FILE__, __LINE__, "%s", report.text);
  }
}

// The next line to be logged, outside the lock. True: there may be more.
bool Monitor::next_stall_report(StallReport& report) {
  const MutexLock lock(mutex_);
  const std::uint64_t now = monotonic_ns();
  if (now < next_stall_check_ns_) return false;
  for (auto at = connections_.upper_bound(last_checked_fd_); at != connections_.end(); ++at) {
    last_checked_fd_ = at->first;
    Connection& connection = at->second;
    if (connection.closing != nullptr || connection.peer_closed || connection.failure_exchanged) continue;
    if (check_connection(connection, now, report)) return true;
  }
  last_checked_fd_ = -1;
  next_stall_check_ns_ =
      now + (any_outstanding_ ? settings_.stalls.busy_period_ns() : settings_.stalls.idle_period_ns());
  any_outstanding_ = false;
  return false;
}

bool Monitor::check_connection(Connection& connection, std::uint64_t now, StallReport& report) {
  Comm& comm = *connection.comm;
  StallDetector& detector = connection.stall_detector;
  const Comm::Activity activity = comm.take_activity();
  const StallDetector::Action action =
      detector.check(settings_.stalls, now, comm.status(), activity.send_refused, activity.tested);
  any_outstanding_ = any_outstanding_ || detector.has_outstanding();
  const PeerName peer(comm);
  char cause[320];
  switch (action) {
    case StallDetector::Action::kNone:
      return false;
    case StallDetector::Action::kAsk:
      connection.channel.send(comm.side_channel(), wire::Notice::status_query(detector.query_id()));
      return false;
    case StallDetector::Action::kRecovered:
      report.level = LogLevel::kInfo;
      std::snprintf(report.text, sizeof report.text, "the connection with the peer %s moves again, after %.1f s",
                    peer.text, seconds(detector.last_stall_ns()));
      return true;
    case StallDetector::Action::kFail: {
      describe_stall_cause(detector.cause(), peer.text, cause);
      char why[512];
      std::snprintf(why, sizeof why, "stalled for %.1f s (VERBATIM_STALL_FAIL_S): %s",
                    seconds(detector.stalled_ns(now)), cause);
      fail_connection(connection, is_local(detector.cause()) ? ErrorKind::kSystem : ErrorKind::kRemote, why);
      return false;
    }
    case StallDetector::Action::kReport:
      break;
  }
  describe_stall_cause(detector.cause(), peer.text, cause);
  char local_text[256];
  char peer_text[256] = "no answer";
  describe_status(connection_status(connection, now), local_text);
  if (detector.peer()) describe_status(*detector.peer(), peer_text);
  char next[256];
  const Device& device = *comm.endpoint().ports().front()->device;
  describe_next_step(detector.cause(), peer.text, device.name().c_str(), next);
  std::string path;
  try {
    path = comm.describe_path(0);
  } catch (...) {  // without memory the line is shorter
  }
  report.level = LogLevel::kWarn;
  std::snprintf(report.text, sizeof report.text, "stalled for %.1f s: %s; here: %s; there: %s%s%s. Path: %s",
                seconds(detector.stalled_ns(now)), cause, local_text, peer_text, kNextStep, next, path.c_str());
  return true;
}

void Monitor::open_state_socket() {
  if (settings_.state_socket.empty()) return;
  Result<std::unique_ptr<StateSocket>> opened = StateSocket::open(settings_.state_socket);
  if (!opened) {
    VERBATIM_WARN("no state can be read at %s (VERBATIM_STATE_SOCKET): %s: %s%s", settings_.state_socket.c_str(),
                  opened.error().operation, std::strerror(opened.error().sys_errno),
                  opened.error().sys_errno == EADDRINUSE ? "; a path with %p in it is each process's own" : "");
    return;
  }
  state_socket_ = std::move(*opened);
  state_resumes_ns_ = monotonic_ns();
}

// State that nobody has memory for is not given: the reader sees an empty answer.
void Monitor::serve_state() noexcept {
  while (true) {
    Result<std::optional<UniqueFd>> reader = state_socket_->accept();
    if (!reader) return pause_state_socket(reader.error().sys_errno);
    if (!*reader) return;
    try {
      state_socket_->send_reply(std::move(**reader), state_json(), monotonic_ns());
    } catch (...) {
    }
  }
}

std::string Monitor::state_json() {
  std::string out = "{\"version\":1," + json_field("host", std::string_view(settings_.host)) + "," +
                    json_field("pid", static_cast<std::uint64_t>(::getpid())) + ",\"connections\":[";
  const char* separator = "\n";
  int after = -1;
  while (true) {
    const MutexLock lock(mutex_);
    const auto at = connections_.upper_bound(after);
    if (at == connections_.end()) break;
    after = at->first;
    const Connection& connection = at->second;
    const wire::ConnectionStatus status = connection_status(connection, monotonic_ns());
    out += separator;
    out += connection_json(*connection.comm, status, connection.stall_detector, connection.closing != nullptr,
                           connection.peer_closed);
    separator = ",\n";
  }
  return out + "\n]}\n";
}

}  // namespace verbatim
