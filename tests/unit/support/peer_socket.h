// The peer's end of a side channel, in a test: a TCP connection, and the messages on it. The session key of the
// connection is zero.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/result.h"
#include "base/socket.h"
#include "base/unique_fd.h"
#include "channel/message_stream.h"
#include "wire/authentication.h"
#include "wire/notice.h"

namespace verbatim::test {

class PeerSocket {
 public:
  PeerSocket() = default;
  // `own`: 1: the test is the end that has connected, 0: the one that has accepted. `dialer`, `number`: as of
  // wire::channel_key().
  PeerSocket(UniqueFd socket, std::uint64_t own, std::uint64_t dialer = 1, std::uint64_t number = 0)
      : socket_(std::move(socket)), own_(own), key_(wire::channel_key({}, dialer, number)) {
    stream_->begin(key_, own);
  }
  // Waits for the request of the other end to make the side channel again.
  static PeerSocket asked(UniqueFd socket) {
    std::array<std::uint8_t, wire::kHeaderBytes + sizeof(wire::Resume) + wire::kMacBytes> message{};
    std::size_t filled = 0;
    while (true) {
      const Result<bool> whole = receive_into(socket, message, filled);
      if (whole && *whole) break;
      pollfd waits{socket.get(), POLLIN, 0};
      if (!whole || ::poll(&waits, 1, 20'000) != 1) {
        ADD_FAILURE() << "no request has come";
        return {};
      }
    }
    EXPECT_TRUE(wire::has_mac(message, {}));
    const std::span<const std::uint8_t> body = std::span(message).subspan(wire::kHeaderBytes, sizeof(wire::Resume));
    const std::optional<wire::Resume> resume = wire::decode_resume(body);
    EXPECT_TRUE(resume);
    if (!resume) return {};
    return {std::move(socket), resume->end.connecting, 1 - resume->end.connecting, resume->number};
  }

  explicit operator bool() const { return static_cast<bool>(socket_); }
  const UniqueFd& socket() const { return socket_; }
  std::uint64_t own() const { return own_; }
  void reset() { socket_.reset(); }
  void close_with_reset() { verbatim::close_with_reset(socket_); }

  // The message with the MAC of the next one.
  std::vector<std::uint8_t> next_bytes(std::span<const std::uint8_t> message) {
    return wire::with_mac({message.begin(), message.end()}, key_, wire::message_context(own_, sent_++));
  }
  // False: the other end has closed the connection.
  bool say(std::span<const std::uint8_t> message) {
    const std::vector<std::uint8_t> bytes = next_bytes(message);
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  bool say(const wire::Notice& notice) { return say(notice.bytes()); }
  bool say(wire::MessageType type) { return say(wire::Notice::without_body(type)); }
  Result<std::optional<MessageStream::Message>> receive() { return stream_->receive(socket_); }

 private:
  UniqueFd socket_;
  std::uint64_t own_ = 0;
  wire::Key key_{};
  std::uint64_t sent_ = 0;
  std::unique_ptr<MessageStream> stream_ = std::make_unique<MessageStream>();
};

}  // namespace verbatim::test
