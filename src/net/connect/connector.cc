#include "net/connect/connector.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "channel/message_stream.h"

namespace verbatim {

namespace {

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
      key_(settings.listener.keys().hello_key(handle.secret)),
      deadline_ns_(monotonic_ns() + settings.comm.config.connect_timeout_s * kNanosecondsPerSecond),
      reservation_(reserve(settings, ports_, handle)),
      dial_(handle.address, settings.local_address, deadline_ns_),
      addresses_(settings.listener.addresses(Listener::Use::kHold)) {}

Connector::~Connector() {
  settings_.listener.release();
}

Result<std::unique_ptr<SendComm>> Connector::advance() {
  VerbBudget budget;
  while (true) {
    const Result<bool> done = state_ == State::kCreateQps    ? take_endpoint(budget)
                              : state_ == State::kDial       ? dial()
                              : state_ == State::kConnectQps ? connect_qps(budget)
                                                             : ready_.send(dial_.socket());
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
      comm_->channel().set_socket(dial_.take_socket(), *session_);
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

wire::Hello Connector::make_hello() {
  wire::Hello hello = comm_->hello();
  hello.listen = wire::listen_id(handle_.secret);
  hello.key = settings_.listener.keys().sent();
  hello.identity = settings_.identity(*ports_.front());
  hello.traffic_class = static_cast<std::int16_t>(traffic_class_);
  hello.attempt = attempt_++;
  hello.addresses = addresses_;
  return hello;
}

Result<bool> Connector::dial() {
  settings_.listener.serve();  // two processes that wait for each other's closed listens must end
  const Result<bool> replied = dial_.advance([&] {
    std::vector<std::uint8_t> hello =
        wire::with_mac(wire::encode_hello(wire::MessageType::kConnect, make_hello()), key_);
    hello_mac_ = wire::mac_of(hello);
    return hello;
  });
  if (!replied || !*replied) return replied;
  if (!dial_.reply().authenticate(key_, hello_mac_)) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
  Result<wire::Hello> hello = wire::decode_hello(dial_.reply().body());
  if (!hello) return Error{ErrorKind::kRemote, EPROTO, hello.error().operation};
  session_ = settings_.listener.keys().session_key(key_, hello->key, hello_mac_, dial_.reply().mac());
  if (!session_) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
  remote_ = std::move(*hello);
  return true;
}

Result<bool> Connector::connect_qps(VerbBudget& budget) {
  const Result<bool> connected = comm_->connect(remote_, traffic_class_, budget);
  if (!connected || !*connected) return connected;
  ready_ = OutgoingMessage(wire::with_mac(wire::encode_ready(), *session_));
  return true;
}

void Connector::read_failure_notice() {
  MessageStream channel;
  channel.begin(wire::channel_key(*session_, 1, 0), 1);
  const Result<std::optional<MessageStream::Message>> message = channel.receive(dial_.socket());
  if (!message || !*message || (*message)->type != wire::MessageType::kFailed) return;
  if (const std::optional<wire::FailureNotice> failed = wire::decode_failure((*message)->body)) {
    dial_.set_refusal(failed->kind == ErrorKind::kNone ? kListenClosed : std::string(failed->text));
  }
}

Error Connector::log_timeout() const {
  if (state_ == State::kCreateQps) return log_failure(kQpsNotCreated);
  if (comm_->endpoint().unresolved()) {
    return log_failure(*comm_->endpoint().unresolved(), comm_->endpoint().resolve_repeated());
  }
  const Error pending = dial_.pending();
  return log_failure(pending, pending.step == SetupStep::kConnectTcp);
}

Error Connector::log_failure(const Error& error, bool repeated) const {
  if (error.logged) return error;
  const std::string address = to_string(handle_.address);
  const std::string peer = comm_ != nullptr ? comm_->endpoint().peer_name() : "";
  const std::string& where = peer.empty() ? address : peer;
  const QpUsage usage = qp_usage(ports_);
  Failure failure =
      comm_ != nullptr ? comm_->diagnose_setup(error) : Failure{"", diagnose_setup(error, nullptr, usage)};
  if (!dial_.refusal().empty() || error.step == SetupStep::kConnectTcp || failure.diagnosis.why.empty()) {
    failure.diagnosis = diagnose_dial(dial_, error, where, handle_, settings_.side_channel_name);
  }
  failure.what = "connecting " + join_names(ports_) + " of " + settings_.comm.host_name + " to the peer " + peer +
                 (peer.empty() ? "at " : " at ") + address + " failed: " + to_string(error) +
                 (repeated ? kRepeated : "");
  VERBATIM_WARN("%s", log_line(failure).c_str());
  return error;
}

}  // namespace verbatim
