#include "rma/channel.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/socket.h"

namespace verbatim::rma {
namespace {

// A rank is at most one collective call ahead of another, whose messages are at most three.
constexpr std::size_t kMaxReceived = 16;
// The monitor takes the messages soon.
constexpr std::size_t kMaxLaneMessages = 1024;
constexpr unsigned kFlushPauseUs = 10'000;
// Of a connection whose peer or path takes nothing, while another one works.
constexpr std::size_t kMostUnsent = std::size_t{4} << 20;

}  // namespace

Channel::Channel(UniqueFd socket) : first_fd_(socket.get()) {
  const MutexLock lock(mutex_);
  connections_.push_back({.socket = std::move(socket)});
}

std::vector<int> Channel::fds() const {
  std::vector<int> fds;
  const MutexLock lock(mutex_);
  for (const Connection& connection : connections_) fds.push_back(connection.socket.get());
  return fds;
}

void Channel::add(UniqueFd socket) {
  const MutexLock lock(mutex_);
  connections_.push_back({.socket = std::move(socket), .numbered = true});
}

bool Channel::works(int fd) const {
  const MutexLock lock(mutex_);
  return end_.load(std::memory_order_relaxed) == End::kOpen &&
         std::any_of(connections_.begin(), connections_.end(),
                     [fd](const Connection& connection) { return connection.socket.get() == fd && connection.works; });
}

bool Channel::other_works(const Connection& connection) const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [&](const Connection& other) { return &other != &connection && other.works; });
}

bool Channel::all_sent() const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return connection.works && connection.unsent.empty(); });
}

void Channel::send(const std::vector<std::uint8_t>& message) {
  const MutexLock lock(mutex_);
  if (!last_sent_) send_locked(message);
}

void Channel::send_locked(const std::vector<std::uint8_t>& message) {
  const wire::RmaMessageNumber number = sent_++;
  std::array<std::uint8_t, sizeof number> prefix{};
  std::memcpy(prefix.data(), &number, sizeof number);
  for (Connection& connection : connections_) {
    if (!connection.works) continue;
    std::vector<std::uint8_t>& unsent = connection.unsent;
    if (connection.numbered) unsent.insert(unsent.end(), prefix.begin(), prefix.end());
    unsent.insert(unsent.end(), message.begin(), message.end());
  }
  flush_locked();
}

bool Channel::flush() {
  const MutexLock lock(mutex_);
  flush_locked();
  return all_sent();
}

void Channel::send_all(const std::vector<std::uint8_t>& message, const std::atomic<bool>& stops) {
  send(message);
  while (!stops.load() && end() == End::kOpen && !flush()) ::usleep(kFlushPauseUs);
}

void Channel::flush_locked() {
  for (Connection& connection : connections_) {
    if (connection.works) flush_locked(connection);
  }
  for (Connection& connection : connections_) {
    if (connection.works && connection.unsent.size() > kMostUnsent && all_sent()) {
      fail(connection, "it takes nothing more");
    }
  }
}

void Channel::flush_locked(Connection& connection) {
  std::vector<std::uint8_t>& unsent = connection.unsent;
  std::size_t sent = 0;
  while (sent < unsent.size()) {
    const ssize_t count = ::send(connection.socket.get(), unsent.data() + sent, unsent.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count < 0) {
      const int why = errno;
      connection.send_error = why;
      // The other rank may have sent a reason before.
      while (read_message(connection)) continue;
      return fail(connection, to_string(Error{ErrorKind::kRemote, why, "send"}));
    }
    sent += static_cast<std::size_t>(count);
  }
  unsent.erase(unsent.begin(), unsent.begin() + static_cast<std::ptrdiff_t>(sent));
}

void Channel::fail(Connection& connection, const std::string& why) {
  if (!std::exchange(connection.works, false)) return;
  connection.unsent.clear();
  if (connection.socket.get() == first_fd_) first_works_ = false;
  if (!other_works(connection)) {
    // If the other rank still reads, it must not wait for what does not come.
    ::shutdown(connection.socket.get(), SHUT_RDWR);
    if (end_.load(std::memory_order_relaxed) == End::kOpen) set_end(End::kLost, why);
    return;
  }
  // An end of file would tell the other rank that this process has ended.
  reset_on_close(connection.socket);
  if (end_.load(std::memory_order_relaxed) != End::kOpen) return;
  const Result<sockaddr_storage> remote = remote_address(connection.socket);
  VERBATIM_INFO("RMA: a TCP connection to %s has failed: %s; others to this rank go on",
                remote ? to_string(*remote).c_str() : "a rank", why.c_str());
}

void Channel::send_last(const std::vector<std::uint8_t>& message) {
  const MutexLock lock(mutex_);
  if (std::exchange(last_sent_, true)) return;
  send_locked(message);
  for (const Connection& connection : connections_) {
    if (!connection.works) continue;
    // Behind a part of a message the end of file would look like that of a process.
    if (!connection.unsent.empty() && all_sent()) {
      reset_on_close(connection.socket);
    } else {
      ::shutdown(connection.socket.get(), SHUT_WR);
    }
  }
}

void Channel::receive() {
  const MutexLock lock(mutex_);
  // A connection may wait for a message that another one has read.
  for (bool any = true; any && end_.load(std::memory_order_relaxed) == End::kOpen;) {
    any = false;
    for (Connection& connection : connections_) any = read_all(connection) || any;
    any = any && connections_.size() > 1;
  }
}

bool Channel::read_all(Connection& connection) {
  bool any = false;
  while (connection.works && end_.load(std::memory_order_relaxed) == End::kOpen && read_message(connection)) any = true;
  return any;
}

std::size_t Channel::header_end(const Connection& connection) {
  return (connection.numbered ? sizeof(wire::RmaMessageNumber) : 0) + wire::kHeaderBytes;
}

bool Channel::read_message(Connection& connection) {
  std::vector<std::uint8_t>& incoming = connection.incoming;
  const std::size_t begin = header_end(connection);
  if (incoming.size() < begin) incoming.resize(begin);
  while (true) {
    const Result<bool> all = receive_into(connection.socket, incoming, connection.filled);
    // 0: the process has closed its sockets. But when send has returned the error of a connection, recv returns an end
    // of file in its place; EPIPE comes behind a true one.
    const bool is_end =
        !all && all.error().sys_errno == 0 && (connection.send_error == 0 || connection.send_error == EPIPE);
    if (!all && (is_end || !other_works(connection))) {
      set_end(End::kLost, to_string(all.error()));
      return false;
    }
    if (!all && connection.send_error == 0) fail(connection, to_string(all.error()));
    if (!all || !*all) return false;
    const auto header = wire::decode_rma_header(std::span<const std::uint8_t, wire::kHeaderBytes>(
        incoming.data() + begin - wire::kHeaderBytes, wire::kHeaderBytes));
    if (!header) {
      set_end(End::kLost, header.error().operation);
      return false;
    }
    if (connection.filled < begin + header->body_bytes) {
      incoming.resize(begin + header->body_bytes);
      continue;
    }
    wire::RmaMessageNumber number = connection.received;
    if (connection.numbered) std::memcpy(&number, incoming.data(), sizeof number);
    if (number > next_) {
      if (!other_works(connection)) set_end(End::kLost, "a message is missing");
      return false;
    }
    if (number == next_) {
      ++next_;
      process(header->type, std::span(incoming).subspan(begin));
    }
    ++connection.received;
    incoming.resize(begin);
    connection.filled = 0;
    return true;
  }
}

void Channel::process(wire::RmaMessageType type, std::span<const std::uint8_t> body) {
  switch (type) {
    case wire::RmaMessageType::kExchange: {
      Result<wire::RmaExchange> exchange = wire::decode_rma_exchange(body);
      if (!exchange) return set_end(End::kLost, exchange.error().operation);
      if (received_.size() == kMaxReceived) return set_end(End::kLost, "more messages than calls");
      received_.push_back(std::move(*exchange));
      return;
    }
    case wire::RmaMessageType::kLane: {
      Result<wire::RmaLane> lane = wire::decode_rma_lane(body);
      if (!lane) return set_end(End::kLost, lane.error().operation);
      if (lanes_.size() == kMaxLaneMessages) return set_end(End::kLost, "more messages about lanes than a rank sends");
      lanes_.push_back(std::move(*lane));
      return;
    }
    case wire::RmaMessageType::kClose:
      return set_end(End::kClosed, "it has closed");
    case wire::RmaMessageType::kFailed:
      return set_end(End::kFailed, wire::decode_rma_text(body));
  }
  set_end(End::kLost, "a message that does not belong here");
}

void Channel::give_up(std::string reason) {
  const MutexLock lock(mutex_);
  if (end_.load(std::memory_order_relaxed) == End::kOpen) set_end(End::kLost, std::move(reason));
}

void Channel::set_end(End end, std::string reason) {
  reason_ = std::move(reason);
  ended_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  end_.store(end, std::memory_order_release);
}

std::optional<wire::RmaExchange> Channel::take() {
  const MutexLock lock(mutex_);
  if (received_.empty()) return std::nullopt;
  wire::RmaExchange next = std::move(received_.front());
  received_.pop_front();
  return next;
}

std::optional<wire::RmaLane> Channel::take_lane() {
  const MutexLock lock(mutex_);
  if (lanes_.empty()) return std::nullopt;
  wire::RmaLane next = std::move(lanes_.front());
  lanes_.pop_front();
  return next;
}

std::string Channel::reason() const {
  const MutexLock lock(mutex_);
  return reason_;
}

}  // namespace verbatim::rma
