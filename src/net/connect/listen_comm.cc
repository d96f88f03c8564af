#include "net/connect/listen_comm.h"

#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "net/transfer/side_channel.h"

namespace verbatim {
namespace {

std::string describe_peer(const ConnectRequest& request) {
  const wire::Hello& peer = request.hello;
  const Result<sockaddr_storage> address = remote_address(request.socket);
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
  for (const Handshake& handshake : handshakes_) send_notice(handshake, wire::Notice::failed(ErrorKind::kNone, ""));
  try {
    for (const QueuedRequest& queued : queued_requests_) reject(queued.request);
  } catch (...) {  // no memory: the peers see an end of file
  }
  settings_.listener.remove(handle_.secret);
}

std::shared_ptr<EndpointReservation> ListenComm::reserve(const wire::Hello& peer) const {
  return settings_.endpoints.reserve({.kind = CommKind::kRecv,
                                      .ports = ports_,
                                      .sizes = RecvComm::endpoint_sizes(settings_.comm.config, ports_, peer),
                                      .self = settings_.identity(*ports_.front()),
                                      .peer = peer.identity,
                                      .announced = settings_.endpoints.announced(CommKind::kRecv)});
}

Result<std::unique_ptr<RecvComm>> ListenComm::accept() {
  Result<std::vector<ConnectRequest>> requests = settings_.listener.poll(handle_.secret);
  if (!requests) {
    VERBATIM_WARN("accepting connections at %s failed: %s", to_string(handle_.address).c_str(),
                  to_string(requests.error()).c_str());
    return requests.error();
  }
  for (ConnectRequest& request : *requests) {
    std::shared_ptr<EndpointReservation> reservation = reserve(request.hello);
    queued_requests_.push_back({std::move(request), std::move(reservation)});
  }
  for (auto queued = queued_requests_.begin(); queued != queued_requests_.end();) {
    Result<std::optional<Handshake>> handshake = start_handshake(*queued);
    if (handshake && !*handshake) {
      ++queued;
      continue;
    }
    queued = queued_requests_.erase(queued);
    if (!handshake) return handshake.error();
    handshakes_.push_back(std::move(**handshake));
  }
  for (auto handshake = handshakes_.begin(); handshake != handshakes_.end(); ++handshake) {
    Result<bool> established = advance(*handshake);
    if (established && !*established && monotonic_ns() >= handshake->deadline_ns) {
      established = Error{ErrorKind::kRemote, ETIMEDOUT, "waiting for the peer to finish the handshake", false,
                          SetupStep::kWaitForPeer};
    }
    if (!established) {
      log_failure(handshake->peer, established.error(), {});
      send_notice(*handshake, wire::Notice::failed(established.error().kind, to_string(established.error())));
      handshakes_.erase(handshake);
      return established.error();
    }
    if (*established) {
      std::unique_ptr<RecvComm> comm = std::move(handshake->comm);
      comm->set_side_channel(std::move(handshake->socket));
      handshakes_.erase(handshake);
      return comm;
    }
  }
  return std::unique_ptr<RecvComm>();
}

Result<std::optional<ListenComm::Handshake>> ListenComm::start_handshake(QueuedRequest& queued) {
  const wire::Hello& peer = queued.request.hello;
  Result<std::optional<Endpoint>> endpoint = settings_.endpoints.take(*queued.reservation);
  if (!endpoint)
    return reject_with_error(queued.request, endpoint.error(),
                             {"", diagnose_setup(endpoint.error(), nullptr, qp_usage(*ports_.front()->device))});
  if (!*endpoint) return std::optional<Handshake>();
  // Up to v10 NCCL passes the traffic class of the communicator only to connect.
  const int traffic_class = settings_.traffic_class >= 0 ? settings_.traffic_class : peer.traffic_class;
  Result<std::unique_ptr<RecvComm>> comm = RecvComm::create(settings_.comm, std::move(**endpoint), peer);
  if (!comm) return reject_with_error(queued.request, comm.error(), {});
  const Status connected = (*comm)->connect(peer, traffic_class);
  if (!connected) {
    return reject_with_error(queued.request, connected.error(), (*comm)->diagnose_setup(connected.error()));
  }
  Handshake handshake;
  handshake.deadline_ns = monotonic_ns() + settings_.comm.config.connect_timeout_s * kNanosecondsPerSecond;
  wire::Hello hello = (*comm)->hello();
  hello.secret = handle_.secret;
  hello.identity = handle_.listener;
  handshake.accept_message = OutgoingMessage(wire::encode_hello(wire::MessageType::kAccept, hello));
  handshake.peer = describe_peer(queued.request);
  handshake.socket = std::move(queued.request.socket);
  handshake.comm = std::move(*comm);
  return std::optional<Handshake>(std::move(handshake));
}

Error ListenComm::reject_with_error(const ConnectRequest& request, const Error& error, Failure failure) const {
  const std::string reason = to_string(error);
  const std::string peer = describe_peer(request);
  if (!error.logged) log_failure(peer, error, std::move(failure));
  // Sent only if the socket accepts it at once; the peer sees the end of file in any case.
  static_cast<void>(OutgoingMessage(wire::encode_reject(reason)).send(request.socket));
  return error;
}

void ListenComm::log_failure(const std::string& peer, const Error& error, Failure failure) const {
  if (failure.diagnosis.why.empty()) failure.diagnosis = diagnose_handshake(error, peer);
  failure.what = "accepting a connection from " + peer + " on " + ports_.front()->name + " of " +
                 settings_.comm.host_name + " failed: " + to_string(error);
  VERBATIM_WARN("%s", log_line(failure).c_str());
}

Result<bool> ListenComm::advance(Handshake& handshake) {
  if (handshake.state == Handshake::State::kSendAccept) {
    const Result<bool> sent = handshake.accept_message.send(handshake.socket);
    if (!sent || !*sent) return sent;
    handshake.state = Handshake::State::kReceiveReady;
  }
  const Result<bool> received = handshake.ready_message.receive(handshake.socket);
  if (!received || !*received) return received;
  if (handshake.ready_message.type() == wire::MessageType::kReady) return true;
  return Error{ErrorKind::kRemote, EPROTO, "handshake"};
}

void ListenComm::send_notice(const Handshake& handshake, const wire::Notice& notice) noexcept {
  if (handshake.state != Handshake::State::kReceiveReady) return;
  SideChannel channel;
  channel.send(handshake.socket, notice);
}

}  // namespace verbatim
