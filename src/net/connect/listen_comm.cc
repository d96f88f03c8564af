#include "net/connect/listen_comm.h"

#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "base/socket.h"
#include "channel/message_stream.h"

namespace verbatim {
namespace {

std::string describe_peer(const wire::Hello& peer, const UniqueFd& socket) {
  const Result<sockaddr_storage> address = remote_address(socket);
  return peer.host + " (pid " + std::to_string(peer.pid) + (address ? ", " + to_string(*address) : "") + ")";
}

}  // namespace

Result<std::unique_ptr<ListenComm>> ListenComm::create(const ConnectSettings& settings, std::vector<const Port*> ports,
                                                       std::uint32_t ordinal, wire::Handle& handle) {
  handle.listener = settings.identity(*ports.front());
  handle.listener.listen = ordinal;
  handle.device_count = static_cast<std::uint8_t>(ports.size());
  if (const Status filled = fill_random(std::as_writable_bytes(std::span(handle.secret))); !filled)
    return filled.error();
  const Result<sockaddr_storage> address = settings.listener.add(handle.secret);
  if (!address) {
    VERBATIM_WARN("listening on %s failed: %s: %s; VERBATIM_SOCKET_IFNAME chooses another interface",
                  settings.side_channel_name.c_str(), address.error().operation,
                  std::strerror(address.error().sys_errno));
    return address.error();
  }
  handle.address = *address;
  return std::unique_ptr<ListenComm>(new ListenComm(settings, std::move(ports), handle));
}

ListenComm::~ListenComm() {
  try {
    for (const Handshake& handshake : handshakes_) send_reason(handshake, ErrorKind::kNone, kListenClosed);
  } catch (...) {  // no memory: the peers see an end of file
  }
  settings_.listener.remove(id_);
}

Result<std::unique_ptr<RecvComm>> ListenComm::accept() {
  Result<std::vector<ConnectRequest>> requests = settings_.listener.poll(id_);
  if (!requests) {
    VERBATIM_WARN("accepting connections at %s failed: %s", to_string(handle_.address).c_str(),
                  to_string(requests.error()).c_str());
    return requests.error();
  }
  for (ConnectRequest& request : *requests) begin(std::move(request));
  VerbBudget budget;
  auto first = handshakes_.end();
  auto blocked = handshakes_.end();
  for (auto at = handshakes_.begin(); at != handshakes_.end(); ++at) {
    const bool had_budget = !budget.exhausted();
    Result<bool> established = advance(*at, budget);
    const std::optional<Error> unresolved = at->unresolved();
    const std::uint64_t reserve_ns =
        at->comm != nullptr ? resolve_reserve_ns(at->comm->endpoint(), settings_.comm.config) : 0;
    const bool timed_out = established && !*established && monotonic_ns() >= at->deadline_ns - reserve_ns;
    if (timed_out) {
      established = timeout_error(*at);
    }
    if (!established) {
      const Error error = established.error();
      fail(*at, error, timed_out && unresolved && at->comm->endpoint().resolve_repeated());
      handshakes_.erase(at);
      return error;
    }
    if (*established && first == handshakes_.end()) first = at;
    if (unresolved && had_budget && budget.exhausted()) blocked = at;
  }
  // The attempt to resolve an address exhausts the budget: the next call begins with the others.
  if (blocked != handshakes_.end()) handshakes_.splice(handshakes_.end(), handshakes_, blocked);
  if (first == handshakes_.end()) return std::unique_ptr<RecvComm>();
  std::unique_ptr<RecvComm> comm = std::move(first->comm);
  comm->channel().set_socket(std::move(first->socket), first->session);
  handshakes_.erase(first);
  return comm;
}

// A damaged hello has no reply: the connection is closed.
void ListenComm::begin(ConnectRequest request) {
  Result<wire::Hello> hello = wire::decode_hello(request.hello.body());
  if (!hello) return;
  std::shared_ptr<EndpointReservation> reservation =
      settings_.endpoints.reserve({.kind = CommKind::kRecv,
                                   .ports = ports_,
                                   .sizes = RecvComm::endpoint_sizes(settings_.comm.config, ports_, *hello),
                                   .self = settings_.identity(*ports_.front()),
                                   .peer = hello->identity,
                                   .announced = settings_.endpoints.announced(CommKind::kRecv)});
  const std::uint64_t timeout_ns = settings_.comm.config.connect_timeout_s * kNanosecondsPerSecond;
  handshakes_.push_back({describe_peer(*hello, request.socket), std::move(request.socket), std::move(*hello),
                         request.hello.mac(), std::move(reservation), monotonic_ns() + timeout_ns});
}

Result<bool> ListenComm::advance(Handshake& handshake, VerbBudget& budget) const {
  using State = Handshake::State;
  const UniqueFd& socket = handshake.socket;
  if (handshake.state <= State::kConnectQps) {
    if (const Status open = check_open(socket); !open) return open.error();  // later states use the socket
  }
  while (handshake.state != State::kEstablished) {
    const Result<bool> done = handshake.state == State::kCreateQps    ? create_comm(handshake, budget)
                              : handshake.state == State::kConnectQps ? connect_qps(handshake, budget)
                              : handshake.state == State::kSendAccept ? handshake.accept_message.send(socket)
                                                                      : receive_ready(handshake);
    if (!done || !*done) return done;
    handshake.state = static_cast<State>(static_cast<int>(handshake.state) + 1);
  }
  return true;
}

Result<bool> ListenComm::create_comm(Handshake& handshake, VerbBudget& budget) const {
  const wire::Hello& peer = handshake.hello;
  Result<std::optional<Endpoint>> endpoint = settings_.endpoints.take(*handshake.reservation, budget);
  if (!endpoint) return endpoint.error();
  if (!*endpoint) return false;
  Result<std::unique_ptr<RecvComm>> comm = RecvComm::create(settings_.comm, std::move(**endpoint), peer);
  if (!comm) return comm.error();
  handshake.comm = std::move(*comm);
  handshake.reservation.reset();  // last: if memory runs out above, the next call takes an endpoint again
  return true;
}

Result<bool> ListenComm::connect_qps(Handshake& handshake, VerbBudget& budget) const {
  const wire::Hello& peer = handshake.hello;
  // Up to v10 NCCL passes the traffic class of the communicator only to connect.
  const int traffic_class = settings_.traffic_class >= 0 ? settings_.traffic_class : peer.traffic_class;
  const Result<bool> connected = handshake.comm->connect(peer, traffic_class, budget);
  if (!connected || !*connected) return connected;
  KeyExchange& keys = settings_.listener.keys();
  wire::Hello hello = handshake.comm->hello();
  hello.listen = id_;
  hello.key = keys.sent();
  hello.identity = handle_.listener;
  hello.attempt = peer.attempt;
  hello.addresses = settings_.listener.addresses(Listener::Use::kLook);
  const wire::Key key = keys.hello_key(handle_.secret);
  std::vector<std::uint8_t> reply =
      wire::with_mac(wire::encode_hello(wire::MessageType::kAccept, hello), key, handshake.hello_mac);
  const std::optional<wire::Key> session = keys.session_key(key, peer.key, handshake.hello_mac, wire::mac_of(reply));
  if (!session) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
  handshake.session = *session;
  handshake.accept_message = OutgoingMessage(std::move(reply));
  return true;
}

Result<bool> ListenComm::receive_ready(Handshake& handshake) {
  const Result<bool> received = handshake.ready_message.receive(handshake.socket);
  if (!received || !*received) return received;
  const bool is_ready = handshake.ready_message.type() == wire::MessageType::kReady;
  if (is_ready && handshake.ready_message.authenticate(handshake.session)) return true;
  return Error{ErrorKind::kRemote, EPROTO, "handshake"};
}

Error ListenComm::timeout_error(const Handshake& handshake) {
  if (handshake.state == Handshake::State::kCreateQps) return kQpsNotCreated;
  return handshake.unresolved().value_or(Error{
      ErrorKind::kRemote, ETIMEDOUT, "waiting for the peer to finish the handshake", false, SetupStep::kWaitForPeer});
}

void ListenComm::fail(const Handshake& handshake, const Error& error, bool repeated) const {
  const std::string reason = to_string(error) + (repeated ? kRepeated : "");
  if (!error.logged) log_failure(handshake, error, reason);
  // The peer's operator needs both GIDs, too.
  const bool has_gids = error.step == SetupStep::kMatchGids && handshake.comm != nullptr;
  send_reason(handshake, error.kind,
              has_gids ? reason + ": " + handshake.comm->diagnose_setup(error).diagnosis.why : reason);
}

void ListenComm::log_failure(const Handshake& handshake, const Error& error, const std::string& reason) const {
  const QpUsage usage = qp_usage(ports_);
  Failure failure = handshake.comm == nullptr ? Failure{"", diagnose_setup(error, nullptr, usage)}
                    : handshake.state == Handshake::State::kConnectQps ? handshake.comm->diagnose_setup(error)
                                                                       : Failure();
  if (failure.diagnosis.why.empty()) failure.diagnosis = diagnose_handshake(error, handshake.peer);
  failure.what = "accepting a connection from " + handshake.peer + " on " + join_names(ports_) + " of " +
                 settings_.comm.host_name + " failed: " + reason;
  VERBATIM_WARN("%s", log_line(failure).c_str());
}

void ListenComm::send_reason(const Handshake& handshake, ErrorKind kind, const std::string& reason) {
  const UniqueFd& socket = handshake.socket;
  if (handshake.state <= Handshake::State::kConnectQps) return reject(socket, reason);
  // After kAccept was sent the connection may be established for the peer.
  if (handshake.state == Handshake::State::kSendAccept) return;
  MessageStream channel;
  channel.begin(wire::channel_key(handshake.session, 1, 0), 0);
  channel.add(socket, wire::Notice::failed(kind, reason).bytes());
  channel.flush(socket);
}

}  // namespace verbatim
