#include "net/connector.h"

#include <cerrno>
#include <span>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/net.h"
#include "net/side_channel.h"

namespace verbatim {

Connector::Connector(Context& context, std::vector<const Port*> ports, const wire::Handle& handle, int traffic_class,
                     std::uint64_t attempt)
    : context_(context),
      ports_(std::move(ports)),
      handle_(handle),
      traffic_class_(traffic_class),
      attempt_(attempt),
      deadline_ns_(monotonic_ns() + context.config().connect_timeout_s * kNanosecondsPerSecond),
      claim_(context.claim_send(ports_, peer_id(handle.listener))),
      answer_(wire::kHeaderBytes) {}

Result<std::unique_ptr<SendComm>> Connector::advance() {
  while (true) {
    Result<bool> over = false;
    switch (state_) {
      case State::kQps:
        over = take_qps();
        break;
      case State::kTcp:
        over = reach();
        break;
      case State::kHello:
        over = send_message();
        introduced_ns_ = monotonic_ns();
        break;
      case State::kReady:
        over = send_message();
        break;
      case State::kAnswer:
        over = receive_answer();
        break;
    }
    if (!over && was_late(over.error())) {
      if (const Status begun = knock(); !begun) return report(begun.error());
      state_ = State::kTcp;
      continue;
    }
    if (!over) {
      if (state_ == State::kReady) hear_why();
      return report(over.error());
    }
    if (!*over) {
      if (monotonic_ns() < deadline_ns_) return std::unique_ptr<SendComm>();
      return report({ErrorKind::kRemote, ETIMEDOUT, "waiting for the peer's accept"});
    }
    if (state_ == State::kReady) {
      comm_->keep_side_channel(std::move(socket_));
      return std::move(comm_);
    }
    state_ = static_cast<State>(static_cast<int>(state_) + 1);
  }
}

Result<bool> Connector::take_qps() {
  Result<std::optional<Endpoint>> endpoint = context_.endpoints().take(*claim_);
  if (!endpoint) return endpoint.error();
  if (!*endpoint) return false;
  claim_.reset();
  Result<std::unique_ptr<SendComm>> comm = SendComm::create(context_, std::move(**endpoint), handle_.device_count);
  if (!comm) return comm.error();
  comm_ = std::move(*comm);
  if (const Status begun = knock(); !begun) return begun.error();
  return true;
}

Status Connector::knock() {
  Result<UniqueFd> socket = tcp_connect(handle_.address, context_.local_address());
  if (!socket) return socket.error();
  socket_ = std::move(*socket);
  knocked_ns_ = monotonic_ns();
  return {};
}

Result<bool> Connector::reach() {
  const Result<bool> connected = tcp_connected(socket_);
  if (!connected || !*connected) return connected;
  wire::Hello hello = comm_->hello();
  hello.secret = handle_.secret;
  hello.identity = context_.identity(*ports_.front());
  hello.traffic_class = static_cast<std::int16_t>(traffic_class_);
  hello.attempt = attempt_++;
  outgoing_ = OutgoingMessage(wire::encode_hello(wire::MessageType::kConnect, hello));
  return true;
}

// A hello that came at once has been heard: who hangs up then means it.
bool Connector::was_late(const Error& error) const {
  constexpr std::uint64_t kPromptNs = 10 * kNanosecondsPerMillisecond;
  const bool hung_up = error.kind == ErrorKind::kRemote &&
                       (error.sys_errno == 0 || error.sys_errno == ECONNRESET || error.sys_errno == EPIPE);
  const bool unanswered = (state_ == State::kHello || state_ == State::kAnswer) && answer_filled_ == 0;
  return hung_up && unanswered && introduced_ns_ - knocked_ns_ > kPromptNs && monotonic_ns() < deadline_ns_;
}

Result<bool> Connector::send_message() {
  return outgoing_.send(socket_);
}

Result<bool> Connector::receive_answer() {
  while (true) {
    const Result<bool> all = receive_into(socket_, answer_, answer_filled_);
    if (!all || !*all) return all;
    const Result<wire::Header> header =
        wire::decode_header(std::span<const std::uint8_t, wire::kHeaderBytes>(answer_.data(), wire::kHeaderBytes));
    if (!header) return Error{ErrorKind::kRemote, EPROTO, header.error().operation};
    if (answer_.size() < wire::kHeaderBytes + header->body_bytes) {
      answer_.resize(wire::kHeaderBytes + header->body_bytes);
      continue;
    }
    const std::span<const std::uint8_t> body = std::span(answer_).subspan(wire::kHeaderBytes);
    if (header->type == wire::MessageType::kReject) {
      rejection_ = wire::decode_reject(body);
      return Error{ErrorKind::kRemote, 0, "the peer refused the connection"};
    }
    if (header->type != wire::MessageType::kAccept) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
    const Result<wire::Hello> hello = wire::decode_hello(body);
    if (!hello) return Error{ErrorKind::kRemote, EPROTO, hello.error().operation};
    if (hello->secret != handle_.secret) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
    if (const Status connected = comm_->connect(*hello, traffic_class_); !connected) return connected.error();
    outgoing_ = OutgoingMessage(wire::encode_ready());
    return true;
  }
}

void Connector::hear_why() {
  SideChannel channel;
  const Result<std::optional<SideChannel::Message>> message = channel.receive(socket_);
  if (!message || !*message || (*message)->type != wire::MessageType::kFailed) return;
  if (const std::optional<wire::Failed> failed = wire::decode_failed((*message)->body)) {
    rejection_ = failed->kind == ErrorKind::kNone ? "its application has closed its listen" : failed->text;
  }
}

Error Connector::report(const Error& error) const {
  if (error.logged) return error;
  const std::string address = to_string(handle_.address);
  const bool introduced = comm_ != nullptr && !comm_->endpoint().remote().host.empty();
  const std::string peer = introduced ? comm_->endpoint().peer_name() : "";
  const std::string& where = introduced ? peer : address;
  std::string explanation =
      comm_ != nullptr ? comm_->explain_setup(error) : explain_setup(error, nullptr, qp_room(*ports_.front()->device));
  if (!rejection_.empty()) {
    explanation = ": " + rejection_ + kNextStep +
                  (handle_.version == wire::kProtocolVersion ? "look at " + where + " first: its log says more"
                                                             : "run the same release on all hosts");
  } else if (explanation.empty()) {
    explanation = explain_handshake(error, where, answer_filled_ == 0);
  }
  VERBATIM_WARN("connecting %s of %s to the peer %s%sat %s failed: %s%s", ports_.front()->name.c_str(),
                context_.host_name().c_str(), peer.c_str(), introduced ? " " : "", address.c_str(),
                to_string(error).c_str(), explanation.c_str());
  return error;
}

}  // namespace verbatim
