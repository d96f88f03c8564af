#include "net/acceptor.h"

#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "net/net.h"
#include "net/side_channel.h"

namespace verbatim {
namespace {

std::string name_of(const Introduction& introduction) {
  const wire::Hello& peer = introduction.hello;
  const Result<sockaddr_storage> address = remote_address(introduction.socket);
  return peer.host + " (pid " + std::to_string(peer.pid) + (address ? ", " + to_string(*address) : "") + ")";
}

}  // namespace

Result<std::unique_ptr<ListenComm>> ListenComm::create(Context& context, std::vector<const Port*> ports,
                                                       std::uint32_t ordinal, wire::Handle& handle) {
  handle.listener = context.identity(*ports.front());
  handle.listener.listen = ordinal;
  handle.device_count = static_cast<std::uint8_t>(ports.size());
  if (const Status filled = fill_random(std::as_writable_bytes(std::span(handle.secret))); !filled)
    return filled.error();
  const Result<sockaddr_storage> address = context.listener().add(handle.secret);
  if (!address) {
    VERBATIM_WARN("listening on %s failed: %s: %s; VERBATIM_SOCKET_IFNAME chooses another interface",
                  context.side_channel_name().c_str(), address.error().operation,
                  std::strerror(address.error().sys_errno));
    return address.error();
  }
  handle.address = *address;
  return std::unique_ptr<ListenComm>(new ListenComm(context, std::move(ports), handle));
}

ListenComm::~ListenComm() {
  for (const Acceptance& acceptance : acceptances_) tell(acceptance, wire::Notice::failed(ErrorKind::kNone, ""));
  context_.listener().remove(handle_.secret);
}

Result<std::unique_ptr<RecvComm>> ListenComm::accept() {
  Result<std::vector<Introduction>> introductions = context_.listener().poll(handle_.secret);
  if (!introductions) {
    VERBATIM_WARN("accepting connections at %s failed: %s", to_string(handle_.address).c_str(),
                  to_string(introductions.error()).c_str());
    return introductions.error();
  }
  for (Introduction& introduction : *introductions) {
    std::shared_ptr<EndpointClaim> claim = context_.claim_recv(ports_, introduction.hello);
    arrivals_.push_back({std::move(introduction), std::move(claim)});
  }
  for (auto arrival = arrivals_.begin(); arrival != arrivals_.end();) {
    Result<std::optional<Acceptance>> acceptance = begin(*arrival);
    if (acceptance && !*acceptance) {
      ++arrival;
      continue;
    }
    arrival = arrivals_.erase(arrival);
    if (!acceptance) return acceptance.error();
    acceptances_.push_back(std::move(**acceptance));
  }
  for (auto acceptance = acceptances_.begin(); acceptance != acceptances_.end(); ++acceptance) {
    Result<bool> stands = advance(*acceptance);
    if (stands && !*stands && monotonic_ns() >= acceptance->deadline_ns) {
      stands = Error{ErrorKind::kRemote, ETIMEDOUT, "waiting for the peer to finish the handshake"};
    }
    if (!stands) {
      report(acceptance->peer, stands.error(), explain_handshake(stands.error(), acceptance->peer));
      tell(*acceptance, wire::Notice::failed(stands.error().kind, to_string(stands.error())));
      acceptances_.erase(acceptance);
      return stands.error();
    }
    if (*stands) {
      std::unique_ptr<RecvComm> comm = std::move(acceptance->comm);
      comm->keep_side_channel(std::move(acceptance->socket));
      acceptances_.erase(acceptance);
      return comm;
    }
  }
  return std::unique_ptr<RecvComm>();
}

Result<std::optional<ListenComm::Acceptance>> ListenComm::begin(Arrival& arrival) {
  const wire::Hello& peer = arrival.introduction.hello;
  Result<std::optional<Endpoint>> endpoint = context_.endpoints().take(*arrival.claim);
  if (!endpoint)
    return refuse(arrival.introduction, endpoint.error(),
                  explain_setup(endpoint.error(), nullptr, qp_room(*ports_.front()->device)));
  if (!*endpoint) return std::optional<Acceptance>();
  // Up to v10 only the connecting side is told the communicator's.
  const int traffic_class = context_.traffic_class() >= 0 ? context_.traffic_class() : peer.traffic_class;
  Result<std::unique_ptr<RecvComm>> comm = RecvComm::create(context_, std::move(**endpoint), peer);
  if (!comm) return refuse(arrival.introduction, comm.error(), "");
  const Status connected = (*comm)->connect(peer, traffic_class);
  if (!connected) {
    return refuse(arrival.introduction, connected.error(), (*comm)->explain_setup(connected.error()));
  }
  Acceptance acceptance;
  acceptance.deadline_ns = monotonic_ns() + context_.config().connect_timeout_s * kNanosecondsPerSecond;
  wire::Hello hello = (*comm)->hello();
  hello.secret = handle_.secret;
  hello.identity = handle_.listener;
  acceptance.answer = OutgoingMessage(wire::encode_hello(wire::MessageType::kAccept, hello));
  acceptance.peer = name_of(arrival.introduction);
  acceptance.socket = std::move(arrival.introduction.socket);
  acceptance.comm = std::move(*comm);
  acceptance.ready.resize(wire::kHeaderBytes);
  return std::optional<Acceptance>(std::move(acceptance));
}

Error ListenComm::refuse(const Introduction& introduction, const Error& error, const std::string& explanation) const {
  const std::string reason = to_string(error);
  const std::string peer = name_of(introduction);
  if (!error.logged) report(peer, error, explanation.empty() ? explain_handshake(error, peer) : explanation);
  // The peer is told in one go or not at all: it also sees the end of the file.
  static_cast<void>(OutgoingMessage(wire::encode_reject(reason)).send(introduction.socket));
  return error;
}

void ListenComm::report(const std::string& peer, const Error& error, const std::string& explanation) const {
  VERBATIM_WARN("accepting a connection from %s on %s of %s failed: %s%s", peer.c_str(), ports_.front()->name.c_str(),
                context_.host_name().c_str(), to_string(error).c_str(), explanation.c_str());
}

Result<bool> ListenComm::advance(Acceptance& acceptance) {
  if (acceptance.state == Acceptance::State::kAnswer) {
    const Result<bool> sent = acceptance.answer.send(acceptance.socket);
    if (!sent || !*sent) return sent;
    acceptance.state = Acceptance::State::kReady;
  }
  const Result<bool> received = receive_into(acceptance.socket, acceptance.ready, acceptance.ready_filled);
  if (!received || !*received) return received;
  const Result<wire::Header> header = wire::decode_header(
      std::span<const std::uint8_t, wire::kHeaderBytes>(acceptance.ready.data(), wire::kHeaderBytes));
  if (!header) return Error{ErrorKind::kRemote, EPROTO, header.error().operation};
  if (header->type != wire::MessageType::kReady) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
  return true;
}

void ListenComm::tell(const Acceptance& acceptance, const wire::Notice& notice) noexcept {
  if (acceptance.state != Acceptance::State::kReady) return;
  SideChannel channel;
  channel.send(acceptance.socket, notice);
}

}  // namespace verbatim
