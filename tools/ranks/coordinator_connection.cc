#include "ranks/coordinator_connection.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>

#include "base/clock.h"
#include "base/socket.h"

namespace verbatim::ranks {
namespace {

constexpr int kRetryMs = 100;
constexpr std::chrono::seconds kAbortTimeout{3};

UniqueFd connect_once(const addrinfo& where) {
  sockaddr_storage address{};
  std::memcpy(&address, where.ai_addr, where.ai_addrlen);
  auto socket = tcp_connect(address, {});
  if (!socket) return {};
  pollfd writable{socket->get(), POLLOUT, 0};
  ::poll(&writable, 1, kRetryMs * 10);
  const auto connected = tcp_connected(*socket);
  return connected && *connected ? std::move(*socket) : UniqueFd();
}

UniqueFd connect_to(const std::string& root, int timeout_s) {
  const std::size_t colon = root.rfind(':');
  if (colon == std::string::npos) throw Failure("--root is not HOST:PORT: " + root, ExitStatus::kUsage);
  std::string host = root.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_s) * kNanosecondsPerSecond;
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), root.c_str() + colon + 1, &wanted, &found); error != 0) {
    throw Failure("--root " + root + ": " + gai_strerror(error), ExitStatus::kUsage);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  do {
    for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
      if (UniqueFd socket = connect_once(*address)) return socket;
    }
    ::poll(nullptr, 0, kRetryMs);
  } while (monotonic_ns() < deadline);
  throw Failure("no coordinator accepts connections at " + root + ". Next: check --root and that rank 0 is running");
}

}  // namespace

CoordinatorConnection::CoordinatorConnection(const std::string& root, const Hello& hello, int timeout_s)
    : socket_(connect_to(root, timeout_s)) {
  if (!send_frame(socket_.get(), FrameKind::kHello, {reinterpret_cast<const char*>(&hello), sizeof hello})) {
    throw Failure("lost the connection to " + root);
  }
  listener_ = std::thread([this] { listen(); });
}

CoordinatorConnection::~CoordinatorConnection() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  ::shutdown(socket_.get(), SHUT_RDWR);
  listener_.join();
}

std::vector<std::string> CoordinatorConnection::all_gather(const std::string& part) {
  send_frame(socket_.get(), FrameKind::kGather, part);  // a failure ends the process in listen()
  std::unique_lock lock(mutex_);
  part_arrived_.wait(lock, [this] { return gathered_.has_value(); });
  const std::string packed = std::move(*gathered_);
  gathered_.reset();
  return unpack(packed);
}

void CoordinatorConnection::finish() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  send_frame(socket_.get(), FrameKind::kFinished, {});
}

void CoordinatorConnection::fail(ExitStatus status, const std::string& why) {
  std::string payload(reinterpret_cast<const char*>(&status), sizeof status);
  payload += why;
  if (send_frame(socket_.get(), FrameKind::kFail, payload)) std::this_thread::sleep_for(kAbortTimeout);
  _exit(static_cast<int>(status));  // normally listen() has received the abort and ended the process before
}

void CoordinatorConnection::listen() {
  FrameReader reader;
  for (;;) {
    pollfd readable{socket_.get(), POLLIN, 0};
    ::poll(&readable, 1, -1);
    const FrameReader::State state = reader.read(socket_.get());
    while (const auto frame = reader.next()) {
      if (frame->kind == FrameKind::kGathered) {
        std::lock_guard lock(mutex_);
        gathered_ = frame->payload;
        part_arrived_.notify_one();
      } else if (frame->kind == FrameKind::kAbort) {
        auto status = ExitStatus::kFailed;
        if (frame->payload.size() == sizeof status) std::memcpy(&status, frame->payload.data(), sizeof status);
        _exit(static_cast<int>(status));
      }
    }
    if (state == FrameReader::State::kOpen) continue;
    std::lock_guard lock(mutex_);
    if (leaving_) return;
    print_error("the coordinator of the ranks closed the connection");
    _exit(static_cast<int>(ExitStatus::kFailed));
  }
}

}  // namespace verbatim::ranks
