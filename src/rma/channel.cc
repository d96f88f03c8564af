#include "rma/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "base/socket.h"

namespace verbatim::rma {
namespace {

// A rank is at most one collective call ahead of another, whose messages are at most three.
constexpr std::size_t kMaxReceived = 16;
// The monitor takes the messages soon.
constexpr std::size_t kMaxLaneMessages = 1024;
constexpr int kFlushPollMs = 100;

}  // namespace

void Channel::send(const std::vector<std::uint8_t>& message) {
  const MutexLock lock(mutex_);
  unsent_.insert(unsent_.end(), message.begin(), message.end());
  flush_locked();
}

bool Channel::flush() {
  const MutexLock lock(mutex_);
  flush_locked();
  return unsent_.empty() && !send_failed_;
}

void Channel::send_all(const std::vector<std::uint8_t>& message, const std::atomic<bool>& stops) {
  send(message);
  while (!stops.load() && end() == End::kOpen && !flush()) {
    pollfd socket{socket_.get(), POLLOUT, 0};
    static_cast<void>(::poll(&socket, 1, kFlushPollMs));
  }
}

void Channel::flush_locked() {
  std::size_t sent = 0;
  while (sent < unsent_.size()) {
    const ssize_t count = ::send(socket_.get(), unsent_.data() + sent, unsent_.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count < 0) {
      sent = unsent_.size();
      fail_send(errno);
      break;
    }
    sent += static_cast<std::size_t>(count);
  }
  unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(sent));
}

// The other rank may have sent a reason before. If it still reads, it must not wait for what does not come.
void Channel::fail_send(int why) {
  send_failed_ = true;
  while (end_.load(std::memory_order_relaxed) == End::kOpen && read_message()) continue;
  if (end_.load(std::memory_order_relaxed) == End::kOpen) {
    set_end(End::kLost, to_string(Error{ErrorKind::kRemote, why, "send"}));
  }
  ::shutdown(socket_.get(), SHUT_RDWR);
}

void Channel::send_last(const std::vector<std::uint8_t>& message) {
  send(message);
  ::shutdown(socket_.get(), SHUT_WR);
}

void Channel::receive() {
  const MutexLock lock(mutex_);
  while (end_.load(std::memory_order_relaxed) == End::kOpen && read_message()) continue;
}

bool Channel::read_message() {
  if (incoming_.size() < wire::kHeaderBytes) incoming_.resize(wire::kHeaderBytes);
  while (true) {
    const Result<bool> all = receive_into(socket_, incoming_, filled_);
    if (!all) {
      set_end(End::kLost, to_string(all.error()));
      return false;
    }
    if (!*all) return false;
    const auto header = wire::decode_rma_header(
        std::span<const std::uint8_t, wire::kHeaderBytes>(incoming_.data(), wire::kHeaderBytes));
    if (!header) {
      set_end(End::kLost, header.error().operation);
      return false;
    }
    if (filled_ < wire::kHeaderBytes + header->body_bytes) {
      incoming_.resize(wire::kHeaderBytes + header->body_bytes);
      continue;
    }
    process(header->type, std::span(incoming_).subspan(wire::kHeaderBytes));
    incoming_.resize(wire::kHeaderBytes);
    filled_ = 0;
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
      if (lanes_.size() == kMaxLaneMessages) return set_end(End::kLost, "more messages about lanes than can be");
      lanes_.push_back(std::move(*lane));
      return;
    }
    case wire::RmaMessageType::kClose:
      return set_end(End::kClosed, "it has closed");
    case wire::RmaMessageType::kFailed:
      return set_end(End::kFailed, wire::decode_rma_text(body));
    case wire::RmaMessageType::kHello:
    case wire::RmaMessageType::kWelcome:
      break;
  }
  set_end(End::kLost, "a message that does not belong here");
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
