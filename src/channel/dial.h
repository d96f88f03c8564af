// One connection to a listen of another process: connects over TCP, sends a hello and receives the reply. Never blocks.
//
// A TCP connect that fails because of the network or because the peer's host is busy is repeated until the deadline.
// The attempts alternate between the address of the chosen interface and any address: where the interfaces of both
// hosts are in different subnets, the first may not get through.
//
// The peer closes a TCP connection on which no hello arrives in time. If advance() is called too rarely, the hello is
// late. When the peer has closed the connection without a reply after a late hello, all begins again.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "base/socket.h"
#include "base/unique_fd.h"
#include "channel/incoming_message.h"

namespace verbatim {

class Dial {
 public:
  // `source`: of the chosen interface; its port is ignored.
  Dial(const sockaddr_storage& target, const sockaddr_storage& source, std::uint64_t deadline_ns)
      : target_(target), source_(source), deadline_ns_(deadline_ns) {}

  // Goes as far as it can. True when the reply has arrived. `hello` makes the hello of an attempt,
  // whose attempt number no other one has. An error is final.
  using Hello = std::function<std::vector<std::uint8_t>()>;
  Result<bool> advance(const Hello& hello);

  // When to call advance() again: when this has an event, or at `next_ns`.
  pollfd awaited() const {
    return {socket_.get(), static_cast<short>(state_ == State::kReceive ? POLLIN : POLLOUT), 0};
  }
  std::uint64_t next_ns() const {
    if (!socket_) return next_attempt_ns_;
    return state_ == State::kConnect ? connect_started_ns_ + attempt_limit_ns_ : UINT64_MAX;
  }

  // Why there is no reply yet.
  Error pending() const;

  const UniqueFd& socket() const { return socket_; }
  UniqueFd take_socket() { return std::move(socket_); }
  IncomingMessage& reply() { return reply_; }
  const IncomingMessage& reply() const { return reply_; }
  // Why the peer has ended the handshake, if the peer has sent it.
  const std::string& refusal() const { return refusal_; }
  void set_refusal(std::string reason) { refusal_ = std::move(reason); }

 private:
  enum class State : std::uint8_t { kConnect, kSend, kReceive };

  Result<bool> connect();
  // Prepares the next attempt and returns false, or returns the error if another attempt would fail too.
  Result<bool> repeat_connect(const Error& error, std::uint64_t now);
  Result<bool> receive();
  // Whether `error` may come from a peer that has closed the connection because the hello was late.
  bool is_of_late_hello(const Error& error) const;

  const sockaddr_storage target_;
  const sockaddr_storage source_;
  const std::uint64_t deadline_ns_;
  State state_ = State::kConnect;
  UniqueFd socket_;
  bool bound_ = true;      // the attempt is made from `source_`
  bool listened_ = false;  // an attempt has succeeded
  Error connect_error_{ErrorKind::kRemote, ETIMEDOUT, "connect", false, SetupStep::kConnectTcp};  // of the last attempt
  std::uint64_t next_attempt_ns_ = 0;
  // The kernel sends a second SYN after 1 s, and gives up after two minutes. Pause and limit are doubled with each pair
  // of attempts.
  std::uint64_t attempt_pause_ns_ = 20 * kNanosecondsPerMillisecond;
  std::uint64_t attempt_limit_ns_ = 2 * kNanosecondsPerSecond;
  std::uint64_t connect_started_ns_ = 0;
  std::uint64_t hello_sent_ns_ = 0;
  OutgoingMessage outgoing_;
  IncomingMessage reply_;
  std::string refusal_;
};

}  // namespace verbatim
