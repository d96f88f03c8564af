// How the control thread looks on: stalls, the peers' views, and the state that it gives to whoever asks.
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "base/log.h"
#include "net/comm.h"
#include "net/control.h"
#include "net/dump.h"
#include "net/failure.h"
#include "net/json.h"

namespace verbatim {
namespace {

double seconds(std::uint64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / static_cast<double>(kNanosecondsPerSecond);
}

}  // namespace

struct ControlThread::Report {
  LogLevel level = LogLevel::kWarn;
  char text[1000];
};

wire::View ControlThread::view_of(const Connection& connection, std::uint64_t now) {
  constexpr unsigned kOfLate = wire::View::kWaits | wire::View::kPolls;
  const Comm& comm = *connection.comm;
  wire::View view = comm.view();
  view.flags = static_cast<std::uint16_t>(view.flags | (connection.watch.mine().flags & kOfLate));
  if (comm.failure_text() != nullptr) view.flags |= wire::View::kFailed;
  asked_about_ = &comm;
  mutex_.unlock();
  const ibv_qp_state state = comm.qp_state();
  mutex_.lock();
  asked_about_ = nullptr;
  changed_.notify_all();
  view.qp_state = static_cast<std::uint8_t>(state);
  if (connection.watch.owes()) {
    view.still_ms = static_cast<std::uint32_t>(connection.watch.still_ns(now) / kNanosecondsPerMillisecond);
  }
  return view;
}

void ControlThread::report_stalls() {
  Report report;
  while (find_stall(report)) {
    log_line(report.level, __FILE__, __LINE__, "%s", report.text);
  }
}

// The next line to be logged, outside the lock. True: there may be more.
bool ControlThread::find_stall(Report& report) {
  const MutexLock lock(mutex_);
  const std::uint64_t now = monotonic_ns();
  if (now < next_look_ns_) return false;
  for (auto at = connections_.upper_bound(looked_at_); at != connections_.end(); ++at) {
    looked_at_ = at->first;
    Connection& connection = at->second;
    if (connection.parked != nullptr || connection.peer_closed || connection.failure_told) continue;
    if (look_at(connection, now, report)) return true;
  }
  looked_at_ = -1;
  next_look_ns_ = now + (someone_owes_ ? settings_.stalls.busy_period_ns() : settings_.stalls.idle_period_ns());
  someone_owes_ = false;
  return false;
}

bool ControlThread::look_at(Connection& connection, std::uint64_t now, Report& report) {
  Comm& comm = *connection.comm;
  StallWatch& watch = connection.watch;
  const Comm::Marks marks = comm.take_marks();
  const StallWatch::Step step = watch.look(settings_.stalls, now, comm.view(), marks.waits, marks.polls);
  someone_owes_ = someone_owes_ || watch.owes();
  const PeerName peer(comm);
  char blame[320];
  switch (step) {
    case StallWatch::Step::kNothing:
      return false;
    case StallWatch::Step::kAsk:
      connection.channel.send(comm.side_channel(), wire::Notice::ask(watch.question()));
      return false;
    case StallWatch::Step::kMovesAgain:
      report.level = LogLevel::kInfo;
      std::snprintf(report.text, sizeof report.text, "the connection with the peer %s moves again, after %.1f s",
                    peer.text, seconds(watch.stood_ns()));
      return true;
    case StallWatch::Step::kFail: {
      describe_blame(watch.blame(), peer.text, blame);
      char why[512];
      std::snprintf(why, sizeof why, "stalled for %.1f s (VERBATIM_STALL_FAIL_S): %s", seconds(watch.still_ns(now)),
                    blame);
      condemn(connection, is_ours(watch.blame()) ? ErrorKind::kSystem : ErrorKind::kRemote, why);
      return false;
    }
    case StallWatch::Step::kReport:
      break;
  }
  describe_blame(watch.blame(), peer.text, blame);
  char here[256];
  char there[256] = "no answer";
  describe_view(view_of(connection, now), here);
  if (watch.peer()) describe_view(*watch.peer(), there);
  char next[256];
  const Device& device = *comm.endpoint().ports().front()->device;
  describe_next(watch.blame(), peer.text, device.name().c_str(), next);
  std::string path;
  try {
    path = comm.describe_path(0);
  } catch (...) {  // without memory the line is shorter
  }
  report.level = LogLevel::kWarn;
  std::snprintf(report.text, sizeof report.text, "stalled for %.1f s: %s; here: %s; there: %s%s%s. Path: %s",
                seconds(watch.still_ns(now)), blame, here, there, kNextStep, next, path.c_str());
  return true;
}

void ControlThread::open_state_socket() {
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
void ControlThread::serve_state() noexcept {
  while (true) {
    Result<std::optional<UniqueFd>> reader = state_socket_->accept();
    if (!reader) return pause_state(reader.error().sys_errno);
    if (!*reader) return;
    try {
      state_socket_->answer(std::move(**reader), state_json(), monotonic_ns());
    } catch (...) {
    }
  }
}

std::string ControlThread::state_json() {
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
    const wire::View view = view_of(connection, monotonic_ns());
    out += separator;
    out +=
        connection_json(*connection.comm, view, connection.watch, connection.parked != nullptr, connection.peer_closed);
    separator = ",\n";
  }
  return out + "\n]}\n";
}

}  // namespace verbatim
