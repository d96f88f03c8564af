#include "channel/dial.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "channel/hello_limits.h"

namespace verbatim {
namespace {

// Between two pairs of attempts to connect.
constexpr std::uint64_t kMaxAttemptPauseNs = kNanosecondsPerSecond;

}  // namespace

Result<bool> Dial::advance(const Hello& hello) {
  while (true) {
    const Result<bool> done = state_ == State::kConnect ? connect()
                              : state_ == State::kSend  ? outgoing_.send(socket_)
                                                        : receive();
    if (state_ == State::kSend) hello_sent_ns_ = monotonic_ns();
    if (!done && is_of_late_hello(done.error())) {
      socket_.reset();
      state_ = State::kConnect;
      continue;
    }
    if (!done || !*done || state_ == State::kReceive) return done;
    if (state_ == State::kConnect) outgoing_ = OutgoingMessage(hello());
    state_ = static_cast<State>(static_cast<int>(state_) + 1);
  }
}

Result<bool> Dial::connect() {
  const std::uint64_t now = monotonic_ns();
  if (!socket_) {
    if (now < next_attempt_ns_) return false;
    Result<UniqueFd> socket = tcp_connect(target_, bound_ ? source_ : sockaddr_storage{});
    if (!socket) return repeat_connect(socket.error(), now);
    socket_ = std::move(*socket);
    connect_started_ns_ = now;
  }
  const Result<bool> connected = tcp_connected(socket_);
  if (!connected) return repeat_connect(connected.error(), now);
  if (!*connected) {
    if (now - connect_started_ns_ < attempt_limit_ns_) return false;
    return repeat_connect({ErrorKind::kRemote, ETIMEDOUT, "connect"}, now);
  }
  listened_ = true;
  return true;
}

Result<bool> Dial::repeat_connect(const Error& error, std::uint64_t now) {
  socket_.reset();
  connect_error_ = error;
  if (error.kind == ErrorKind::kRemote || error.sys_errno == EADDRNOTAVAIL) {
    connect_error_.step = SetupStep::kConnectTcp;
  }
  // Only the address of an interface on its link leads to a link-local address.
  const bool was_bound = std::exchange(bound_, !bound_ || is_link_local(target_));
  // A listener that has accepted a connection of this end and refuses another one is closed.
  const bool closed = listened_ && error.sys_errno == ECONNREFUSED;
  const bool may_pass = is_passing(error) || (was_bound && !bound_ && error.kind == ErrorKind::kRemote);
  if (closed || !may_pass) return connect_error_;
  if (!bound_) return false;
  next_attempt_ns_ = now + attempt_pause_ns_;
  attempt_pause_ns_ = std::min(2 * attempt_pause_ns_, kMaxAttemptPauseNs);
  attempt_limit_ns_ *= 2;
  return false;
}

Result<bool> Dial::receive() {
  const Result<bool> all = reply_.receive(socket_);
  if (!all || !*all || reply_.type() == wire::MessageType::kAccept) return all;
  if (reply_.type() != wire::MessageType::kReject) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
  refusal_ = wire::decode_reject(reply_.body());
  return Error{ErrorKind::kRemote, 0, "the peer refused the connection"};
}

// A hello that was sent within kMaxHelloDelayNs was not late, so the peer closed the connection for another reason and
// would do so again.
bool Dial::is_of_late_hello(const Error& error) const {
  const bool peer_closed = error.kind == ErrorKind::kRemote &&
                           (error.sys_errno == 0 || error.sys_errno == ECONNRESET || error.sys_errno == EPIPE);
  return peer_closed && state_ != State::kConnect && !reply_.begun() &&
         hello_sent_ns_ - connect_started_ns_ > kMaxHelloDelayNs && monotonic_ns() < deadline_ns_;
}

Error Dial::pending() const {
  if (state_ == State::kConnect) return connect_error_;
  return {ErrorKind::kRemote, ETIMEDOUT, "waiting for the peer's accept", false, SetupStep::kWaitForPeer};
}

}  // namespace verbatim
