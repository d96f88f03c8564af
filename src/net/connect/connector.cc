#include "net/connect/connector.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/connect/hello_limits.h"
#include "net/transfer/side_channel.h"

namespace verbatim {

namespace {

// Pauses between two pairs of attempts to connect.
constexpr std::uint64_t kFirstAttemptPauseNs = 20 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kMaxAttemptPauseNs = kNanosecondsPerSecond;
// The kernel sends a second SYN after 1 s, and gives up after two minutes. Doubled with each pair of attempts.
constexpr std::uint64_t kFirstAttemptLimitNs = 2 * kNanosecondsPerSecond;

// Only the address of an interface on its link leads to a link-local address.
bool needs_interface(const sockaddr_storage& remote) {
  return remote.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(remote).sin6_addr);
}

// A place among the QPs of this communicator for a connection to the peer of `handle`. QPs for every port of the end
// that has more: QP j is on port j modulo their number at either end.
std::shared_ptr<EndpointReservation> reserve(const ConnectSettings& settings, const std::vector<const Port*>& ports,
                                             const wire::Handle& handle) {
  const Config& config = settings.comm.config;
  const AnnouncedFlows announced = settings.endpoints.announced(CommKind::kSend);
  const unsigned qps = choose_qps(config.qps_per_connection, announced);
  const std::size_t devices = std::max<std::size_t>(ports.size(), handle.device_count);
  return settings.endpoints.reserve({.kind = CommKind::kSend,
                                     .ports = ports,
                                     .sizes = SendComm::endpoint_sizes(devices, qps, config),
                                     .self = settings.identity(*ports.front()),
                                     .peer = handle.listener,
                                     .announced = announced});
}

}  // namespace

Connector::Connector(const ConnectSettings& settings, std::vector<const Port*> ports, const wire::Handle& handle,
                     int traffic_class, std::uint64_t attempt)
    : settings_(settings),
      ports_(std::move(ports)),
      handle_(handle),
      traffic_class_(traffic_class),
      attempt_(attempt),
      deadline_ns_(monotonic_ns() + settings.comm.config.connect_timeout_s * kNanosecondsPerSecond),
      reservation_(reserve(settings, ports_, handle)),
      attempt_pause_ns_(kFirstAttemptPauseNs),
      attempt_limit_ns_(kFirstAttemptLimitNs),
      addresses_(settings.listener.addresses(Listener::Use::kHold)) {}

Connector::~Connector() {
  settings_.listener.release();
}

Result<std::unique_ptr<SendComm>> Connector::advance() {
  VerbBudget budget;
  while (true) {
    Result<bool> done = false;
    switch (state_) {
      case State::kCreateQps:
        done = take_endpoint(budget);
        break;
      case State::kConnectTcp:
        done = connect_tcp();
        break;
      case State::kSendHello:
        done = outgoing_.send(socket_);
        hello_sent_ns_ = monotonic_ns();
        break;
      case State::kSendReady:
        done = outgoing_.send(socket_);
        break;
      case State::kReceiveReply:
        done = receive_reply();
        break;
      case State::kConnectQps:
        done = connect_qps(budget);
        break;
    }
    if (!done && should_retry(done.error())) {
      socket_.reset();
      state_ = State::kConnectTcp;
      continue;
    }
    if (!done) {
      if (state_ == State::kSendReady) read_failure_notice();
      return log_failure(done.error());
    }
    if (!*done) {
      const std::uint64_t reserve_ns =
          comm_ != nullptr ? resolve_reserve_ns(comm_->endpoint(), settings_.comm.config) : 0;
      if (monotonic_ns() < deadline_ns_ - reserve_ns) return std::unique_ptr<SendComm>();
      return log_timeout();
    }
    if (state_ == State::kSendReady) {
      comm_->set_side_channel(std::move(socket_));
      return std::move(comm_);
    }
    state_ = static_cast<State>(static_cast<int>(state_) + 1);
  }
}

Result<bool> Connector::take_endpoint(VerbBudget& budget) {
  Result<std::optional<Endpoint>> endpoint = settings_.endpoints.take(*reservation_, budget);
  if (!endpoint) return endpoint.error();
  if (!*endpoint) return false;
  Result<std::unique_ptr<SendComm>> comm =
      SendComm::create(settings_.comm, std::move(**endpoint), handle_.device_count);
  if (!comm) return comm.error();
  comm_ = std::move(*comm);
  reservation_.reset();  // last: if memory runs out above, the next call takes an endpoint again
  return true;
}

Result<bool> Connector::connect_tcp() {
  const std::uint64_t now = monotonic_ns();
  if (!socket_) {
    if (now < next_attempt_ns_) return false;
    Result<UniqueFd> socket = tcp_connect(handle_.address, bound_ ? settings_.local_address : sockaddr_storage{});
    if (!socket) return repeat_connect(socket.error());
    socket_ = std::move(*socket);
    connect_started_ns_ = now;
  }
  const Result<bool> connected = tcp_connected(socket_);
  if (!connected) return repeat_connect(connected.error());
  if (!*connected) {
    if (now - connect_started_ns_ < attempt_limit_ns_) return false;
    return repeat_connect({ErrorKind::kRemote, ETIMEDOUT, "connect"});
  }
  listened_ = true;
  wire::Hello hello = comm_->hello();
  hello.secret = handle_.secret;
  hello.identity = settings_.identity(*ports_.front());
  hello.traffic_class = static_cast<std::int16_t>(traffic_class_);
  hello.attempt = attempt_++;
  hello.addresses = addresses_;
  outgoing_ = OutgoingMessage(wire::encode_hello(wire::MessageType::kConnect, hello));
  return true;
}

Result<bool> Connector::repeat_connect(const Error& error) {
  socket_.reset();
  tcp_error_ = error;
  if (error.kind == ErrorKind::kRemote || error.sys_errno == EADDRNOTAVAIL) tcp_error_->step = SetupStep::kConnectTcp;
  const bool was_bound = std::exchange(bound_, !bound_ || needs_interface(handle_.address));
  // A listener that has accepted a connection of this connector and refuses another one is closed.
  const bool closed = listened_ && error.sys_errno == ECONNREFUSED;
  const bool may_pass = is_passing(error) || (was_bound && !bound_ && error.kind == ErrorKind::kRemote);
  if (closed || !may_pass) return *tcp_error_;
  if (!bound_) return false;
  next_attempt_ns_ = monotonic_ns() + attempt_pause_ns_;
  attempt_pause_ns_ = std::min(2 * attempt_pause_ns_, kMaxAttemptPauseNs);
  attempt_limit_ns_ *= 2;
  return false;
}

// A hello that was sent within kMaxHelloDelayNs was not late, so the peer closed the connection for another reason and
// would do so again.
bool Connector::should_retry(const Error& error) const {
  const bool peer_closed = error.kind == ErrorKind::kRemote &&
                           (error.sys_errno == 0 || error.sys_errno == ECONNRESET || error.sys_errno == EPIPE);
  const bool no_reply = (state_ == State::kSendHello || state_ == State::kReceiveReply) && !reply_.begun();
  return peer_closed && no_reply && hello_sent_ns_ - connect_started_ns_ > kMaxHelloDelayNs &&
         monotonic_ns() < deadline_ns_;
}

Result<bool> Connector::receive_reply() {
  settings_.listener.serve();  // two processes that wait for each other's closed listens must end
  const Result<bool> all = reply_.receive(socket_);
  if (!all || !*all) return all;
  if (reply_.type() == wire::MessageType::kReject) {
    reject_reason_ = wire::decode_reject(reply_.body());
    return Error{ErrorKind::kRemote, 0, "the peer refused the connection"};
  }
  if (reply_.type() != wire::MessageType::kAccept) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
  Result<wire::Hello> hello = wire::decode_hello(reply_.body());
  if (!hello) return Error{ErrorKind::kRemote, EPROTO, hello.error().operation};
  if (hello->secret != handle_.secret) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
  remote_ = std::move(*hello);
  return true;
}

Result<bool> Connector::connect_qps(VerbBudget& budget) {
  const Result<bool> connected = comm_->connect(remote_, traffic_class_, budget);
  if (!connected || !*connected) return connected;
  outgoing_ = OutgoingMessage(wire::encode_ready());
  return true;
}

void Connector::read_failure_notice() {
  SideChannel channel;
  const Result<std::optional<SideChannel::Message>> message = channel.receive(socket_);
  if (!message || !*message || (*message)->type != wire::MessageType::kFailed) return;
  if (const std::optional<wire::FailureNotice> failed = wire::decode_failure((*message)->body)) {
    reject_reason_ = failed->kind == ErrorKind::kNone ? kListenClosed : failed->text;
  }
}

Error Connector::log_timeout() const {
  if (state_ == State::kConnectTcp) {
    return log_failure(
        tcp_error_.value_or(Error{ErrorKind::kRemote, ETIMEDOUT, "connect", false, SetupStep::kConnectTcp}), true);
  }
  if (state_ == State::kCreateQps) return log_failure(kQpsNotCreated);
  if (comm_ != nullptr && comm_->endpoint().unresolved()) {
    return log_failure(*comm_->endpoint().unresolved(), comm_->endpoint().resolve_repeated());
  }
  return log_failure({ErrorKind::kRemote, ETIMEDOUT, "waiting for the peer's accept", false, SetupStep::kWaitForPeer});
}

Error Connector::log_failure(const Error& error, bool repeated) const {
  if (error.logged) return error;
  const std::string address = to_string(handle_.address);
  const std::string peer = comm_ != nullptr ? comm_->endpoint().peer_name() : "";
  const std::string& where = peer.empty() ? address : peer;
  const QpUsage usage = qp_usage(ports_);
  Failure failure =
      comm_ != nullptr ? comm_->diagnose_setup(error) : Failure{"", diagnose_setup(error, nullptr, usage)};
  if (!reject_reason_.empty()) {
    failure.diagnosis = {reject_reason_, handle_.version == wire::kProtocolVersion
                                             ? "look at " + where + " first: its log says more"
                                             : "run the same release on all hosts"};
  } else if (error.step == SetupStep::kConnectTcp) {
    failure.diagnosis = diagnose_connect(error, where, handle_.address, settings_.side_channel_name);
  } else if (failure.diagnosis.why.empty()) {
    failure.diagnosis = diagnose_handshake(error, where, !reply_.begun());
  }
  failure.what = "connecting " + join_names(ports_) + " of " + settings_.comm.host_name + " to the peer " + peer +
                 (peer.empty() ? "at " : " at ") + address + " failed: " + to_string(error) +
                 (repeated ? kRepeated : "");
  VERBATIM_WARN("%s", log_line(failure).c_str());
  return error;
}

}  // namespace verbatim
