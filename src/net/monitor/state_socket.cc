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
#include "net/transfer/comm.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kReaderTimeoutNs = 5 * kNanosecondsPerSecond;
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

// Whether a process that is no more has left the socket there.
bool is_stale_socket(const sockaddr_un& address) {
  struct stat found {};
  if (::lstat(address.sun_path, &found) != 0 || !S_ISSOCK(found.st_mode)) return false;
  const Result<UniqueFd> probe = unix_socket();
  return probe && ::connect(probe->get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
         errno == ECONNREFUSED;
}

std::string status_json(const wire::ConnectionStatus& status) {
  char state[96];
  describe_qp_state(status.qp_state, state);
  const auto flag = [&](wire::ConnectionStatus::Flag bit) { return (status.flags & bit) != 0; };
  std::string out = "{" + json_field("messages", status.members) + "," + json_field("bytes", status.bytes) + "," +
                    json_field("outstanding", status.outstanding) + ",";
  if (status.sends != 0) {
    out += json_flag("refused", flag(wire::ConnectionStatus::kSendRefused)) + "," +
           json_flag("cts", flag(wire::ConnectionStatus::kCtsReady));
  } else {
    out += json_field("flushes", status.flushes);
  }
  return out + "," + json_flag("tested", flag(wire::ConnectionStatus::kTested)) + "," +
         json_flag("failed", flag(wire::ConnectionStatus::kFailed)) + "," +
         json_field("qp_state", std::string_view(state)) + "," + json_field("no_progress_ms", status.no_progress_ms) +
         "}";
}

}  // namespace

StateSocket::StateSocket(std::string path, UniqueFd listener)
    : path_(std::move(path)), listener_(std::move(listener)), owner_pid_(::getpid()) {}

StateSocket::~StateSocket() {
  if (owner_pid_ == ::getpid()) ::unlink(path_.c_str());
}

Result<std::unique_ptr<StateSocket>> StateSocket::open(const std::string& path) {
  const Result<sockaddr_un> address = unix_address(path);
  if (!address) return address.error();
  Result<UniqueFd> listener = unix_socket();
  if (!listener) return listener.error();
  // Before it has a name: the file is made with this mode.
  if (::fchmod(listener->get(), S_IRUSR | S_IWUSR) != 0) return system_error("fchmod", errno);
  if (is_stale_socket(*address)) ::unlink(path.c_str());
  if (::bind(listener->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    return system_error("bind", errno);
  }
  std::unique_ptr<StateSocket> made(new StateSocket(path, std::move(*listener)));
  if (::listen(made->listener_.get(), kBacklog) != 0) return system_error("listen", errno);
  return made;
}

Result<std::optional<UniqueFd>> StateSocket::accept() const {
  UniqueFd reader(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (reader) return std::optional<UniqueFd>(std::move(reader));
  if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return std::optional<UniqueFd>();
  return system_error("accept", errno);
}

void StateSocket::send_reply(UniqueFd reader, std::string text, std::uint64_t now) {
  const auto free =
      std::find_if(replies_.begin(), replies_.end(), [](const Reply& send_reply) { return !send_reply.reader; });
  if (free == replies_.end()) return;
  *free = {std::move(reader), std::move(text), 0, now + kReaderTimeoutNs};
  flush(now);
}

bool StateSocket::flush(std::uint64_t now) {
  bool all = true;
  for (Reply& send_reply : replies_) {
    while (send_reply.reader && send_reply.sent < send_reply.text.size()) {
      const ssize_t count = ::send(send_reply.reader.get(), send_reply.text.data() + send_reply.sent,
                                   send_reply.text.size() - send_reply.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count >= 0) {
        send_reply.sent += static_cast<std::size_t>(count);
      } else if (errno == EAGAIN && now < send_reply.deadline_ns) {
        all = false;
        break;
      } else if (errno != EINTR) {
        send_reply.sent = send_reply.text.size();
      }
    }
    if (send_reply.sent == send_reply.text.size()) send_reply = {};
  }
  return all;
}

std::string connection_json(const Comm& comm, const wire::ConnectionStatus& status, const StallDetector& detector,
                            bool closing, bool peer_closed) {
  const Endpoint& endpoint = comm.endpoint();
  const std::string* const failure = comm.failure_text();
  std::string out = "{" + json_field("direction", std::string_view(status.sends != 0 ? "send" : "recv")) + "," +
                    json_field("device", std::string_view(endpoint.ports().front()->name)) + "," +
                    json_field("path", std::string_view(comm.describe_path(0))) + "," +
                    json_field("peer", std::string_view(endpoint.remote().host)) + "," +
                    json_field("peer_pid", endpoint.remote().pid) + "," + json_field("qps", endpoint.qps().size()) +
                    "," +
                    json_field("state", std::string_view(failure != nullptr ? "failed"
                                                         : closing          ? "closing"
                                                         : peer_closed      ? "peer closed"
                                                                            : "open")) +
                    ",\"error\":" + (failure != nullptr ? json_text(*failure) : "null");
  out += ",\"stalled\":";
  if (detector.reported()) {
    char cause[320];
    describe_stall_cause(detector.cause(), endpoint.peer_name().c_str(), cause);
    out += json_text(cause);
  } else {
    out += "null";
  }
  out +=
      ",\"here\":" + status_json(status) + ",\"there\":" + (detector.peer() ? status_json(*detector.peer()) : "null");
  return out + "}";
}

}  // namespace verbatim
