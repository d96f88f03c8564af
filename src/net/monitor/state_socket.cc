#include "net/monitor/state_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "base/state_directory.h"
#include "net/monitor/device_calls.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kReaderTimeoutNs = 5 * kNanosecondsPerSecond;
constexpr std::uint64_t kPauseNs = kNanosecondsPerSecond;
constexpr std::uint64_t kReplyRetryNs = 10 * kNanosecondsPerMillisecond;
constexpr int kBacklog = 8;

Result<sockaddr_un> unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return system_error("bind", ENAMETOOLONG);
  path.copy(address.sun_path, path.size());
  return address;
}

Result<UniqueFd> unix_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return system_error("socket", errno);
  return socket;
}

std::string status_json(const wire::ConnectionStatus& status) {
  const auto flag = [&](const char* name, wire::ConnectionStatus::Flag bit) {
    return json_flag(name, (status.flags & bit) != 0);
  };
  const std::string of_direction = status.sends != 0 ? flag("send_refused", wire::ConnectionStatus::kSendRefused) +
                                                           "," + flag("cts_ready", wire::ConnectionStatus::kCtsReady)
                                                     : json_field("flushes", status.flushes);
  return json_object({json_field("messages", status.members), json_field("bytes", status.bytes),
                      json_field("outstanding", status.outstanding), of_direction,
                      flag("tested", wire::ConnectionStatus::kTested), flag("failed", wire::ConnectionStatus::kFailed),
                      json_field("qp_state", qp_state_name(status.qp_state)),
                      json_field("no_progress_ms", status.no_progress_ms)});
}

// One connection.
std::string connection_json(const MonitoredConnection& connection) {
  const Comm& comm = *connection.comm;
  const Endpoint& endpoint = comm.endpoint();
  const StallDetector& detector = connection.stall_detector;
  const wire::ConnectionStatus status = connection.status(monotonic_ns());
  const std::string* const failure = comm.failure_text();
  // The buckets of two readings must be the same.
  const LatencyStats latencies = TickScale().is_fixed() ? comm.latencies() : LatencyStats{};
  const char* const state = failure != nullptr                           ? "failed"
                            : connection.closing != nullptr              ? "closing"
                            : connection.peer_closed                     ? "peer closed"
                            : connection.comm->channel().is_being_made() ? "side channel lost"
                                                                         : "open";
  const auto cause = [&] {
    return diagnose_stall(detector.cause(), endpoint.peer_name(), "", connection.comm->channel().is_being_made()).why;
  };
  return json_object(
      {json_field("number", connection.number), json_field("direction", status.sends != 0 ? "send" : "recv"),
       json_field("device", join_names(endpoint.ports())),
       json_field("path", comm.describe_path(comm.busiest_qp().value_or(0))),
       json_field("peer_host", endpoint.remote().host), json_field("peer_pid", endpoint.remote().pid),
       json_field("qps", endpoint.qps().size()), json_field("lanes", endpoint.lanes()),
       json_field("lanes_down", comm.lanes_down()), json_field("state", state),
       "\"error\":" + (failure != nullptr ? json_text(*failure) : "null"),
       "\"stall_cause\":" + (detector.reported() ? json_text(cause()) : "null"), "\"local\":" + status_json(status),
       "\"peer\":" + (detector.peer() ? status_json(*detector.peer()) : "null"), latency_json(latencies)});
}

}  // namespace

StateSocket::StateSocket(Options options, UniqueFd listener, ConnectionTable& table, const RmaSets& rma_sets)
    : options_(std::move(options)),
      listener_(std::move(listener)),
      table_(table),
      rma_sets_(rma_sets),
      owner_pid_(::getpid()),
      handler_(
          table.loop, [this](int) { accept(); }, [this] { return advance(); }) {}

StateSocket::~StateSocket() {
  if (bound_ && owner_pid_ == ::getpid()) ::unlink(options_.path.c_str());
}

Result<std::unique_ptr<StateSocket>> StateSocket::open(Options options, ConnectionTable& table,
                                                       const RmaSets& rma_sets) {
  const Result<sockaddr_un> address = unix_address(options.path);
  if (!address) return address.error();
  Result<UniqueFd> listener = unix_socket();
  if (!listener) return listener.error();
  // Before bind(), which creates the file with this mode.
  if (::fchmod(listener->get(), S_IRUSR | S_IWUSR) != 0) return system_error("fchmod", errno);
  if (is_dead_socket(options.path)) ::unlink(options.path.c_str());
  // Before bind() too: without memory for it no file may be left.
  std::unique_ptr<StateSocket> made(new StateSocket(std::move(options), std::move(*listener), table, rma_sets));
  if (::bind(made->listener_.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    return system_error("bind", errno);
  }
  made->bound_ = true;
  if (::listen(made->listener_.get(), kBacklog) != 0) return system_error("listen", errno);
  made->handler_.call_at(0);
  return made;
}

void StateSocket::accept() noexcept {
  handler_.call_at(0);
  while (true) {
    UniqueFd reader(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!reader) {
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) pause(errno);
      return;
    }
    const auto free = std::find_if(replies_.begin(), replies_.end(), [](const Reply& reply) { return !reply.reader; });
    if (free == replies_.end()) continue;  // closes the reader
    const std::uint64_t now = monotonic_ns();
    *free = {std::move(reader), {}, 0, now + kReaderTimeoutNs};
    if (!options_.queries_qps) continue;
    const MutexLock lock(table_.mutex);
    for (auto& [fd, connection] : table_.connections) DeviceCalls::request_qp_state(table_, connection, now);
    states_deadline_ns_ = now + MonitoredConnection::kQpStateTimeoutNs;
    table_.handler.call_at(0);
  }
}

void StateSocket::pause(int why) noexcept {
  VERBATIM_INFO("the state cannot be read at %s (%s) for the moment: %s", options_.path.c_str(), options_.setting,
                std::strerror(why));
  handler_.unwatch(listener_.get());
  resume_ns_ = monotonic_ns() + kPauseNs;
}

std::uint64_t StateSocket::advance() noexcept {
  const std::uint64_t now = monotonic_ns();
  if (now >= resume_ns_) {  // if epoll has no memory for the listener, another pause passes
    resume_ns_ = handler_.watch(listener_.get(), EventHandler::kReadable) ? kNever : now + kPauseNs;
  }
  std::uint64_t next = resume_ns_;
  const auto is_new = [](const Reply& reply) { return reply.reader && reply.text.empty(); };
  if (std::any_of(replies_.begin(), replies_.end(), is_new)) {
    if (states_known(now))
      write_replies();
    else
      next = std::min(next, states_deadline_ns_);
  }
  for (Reply& reply : replies_) {
    if (reply.reader && !is_new(reply) && !send(reply, now)) next = std::min(next, now + kReplyRetryNs);
  }
  return next;
}

void StateSocket::write_replies() noexcept try {
  const std::string text = state_json();
  for (Reply& reply : replies_) {
    if (reply.reader && reply.text.empty()) reply.text = text;
  }
} catch (...) {  // out of memory: the readers get an empty reply
  for (Reply& reply : replies_) {
    if (reply.text.empty()) reply = {};
  }
}

// Whether the QP states of all connections are known or can be awaited no longer.
bool StateSocket::states_known(std::uint64_t now) {
  const MutexLock lock(table_.mutex);
  return !options_.queries_qps || table_.open_qp_state_requests == 0 || now >= states_deadline_ns_;
}

// False: the reader has not read all and its deadline is not over.
bool StateSocket::send(Reply& reply, std::uint64_t now) noexcept {
  while (reply.sent < reply.text.size()) {
    const ssize_t count = ::send(reply.reader.get(), reply.text.data() + reply.sent, reply.text.size() - reply.sent,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      reply.sent += static_cast<std::size_t>(count);
    } else if (errno == EAGAIN && now < reply.deadline_ns) {
      return false;
    } else if (errno != EINTR) {
      break;
    }
  }
  reply = {};
  return true;
}

std::string StateSocket::state_json() const {
  std::string out = "{\"schema\":2," + json_field("host", options_.host) + "," +
                    json_field("pid", static_cast<std::uint64_t>(::getpid())) + "," +
                    json_field("program", program_invocation_short_name) + "," + json_field("time_ns", monotonic_ns()) +
                    ",\"connections\":[";
  const char* separator = "\n";
  int last_fd = -1;
  while (true) {
    const MutexLock lock(table_.mutex);  // for one connection: the threads that connect wait for it
    const auto at = table_.connections.upper_bound(last_fd);
    if (at == table_.connections.end()) break;
    last_fd = at->first;
    out += separator + connection_json(at->second);
    separator = ",\n";
  }
  return out + "\n],\n\"rma\":" + rma_sets_.state_json(monotonic_ns()) + "}\n";
}

}  // namespace verbatim
