#include "rma/handshake.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/context/context.h"
#include "net/diagnose/diagnosis.h"
#include "net/diagnose/failure.h"

namespace verbatim::rma {
namespace {

// Another thread may accept a connection whose hello is not complete: it is not among the sockets that are waited for.
// And there may be no eventfd.
constexpr std::uint64_t kMaxWaitNs = 100 * kNanosecondsPerMillisecond;

std::string rank_name(const wire::RmaHello& hello) {
  return "rank " + std::to_string(hello.rank) + " on " + hello.host + " (pid " + std::to_string(hello.pid) + ")";
}

}  // namespace

Handshake::Handshake(const Config& config, const ProcessParts& process, const PeerChannel::Process& channels,
                     ListenComm& listen, const std::vector<wire::Handle>& handles, std::uint32_t rank)
    : config_(config),
      process_(process),
      channels_(channels),
      listen_(listen),
      handles_(handles),
      rank_(rank),
      deadline_ns_(monotonic_ns() + config.connect_timeout_s * kNanosecondsPerSecond),
      peers_(handles.size() - 1) {
  for (std::uint32_t distance = 1; distance < ranks(); ++distance) {
    const std::uint32_t peer = (rank_ + distance) % ranks();
    peers_[distance - 1].rank = peer;
    if (distance > connects()) continue;
    dialled_.push_back({.rank = peer,
                        .key = listen.listener.keys().hello_key(handles[peer].secret),
                        .dial = Dial(handles_[peer].address, process_.side_channel, deadline_ns_)});
  }
}

bool Handshake::expects(std::uint32_t rank) const {
  if (rank >= ranks() || rank == rank_) return false;
  const std::uint32_t distance = (rank + ranks() - rank_) % ranks();
  return distance > connects() && peers_[distance - 1].channel == nullptr;
}

Result<std::vector<PeerRank>> Handshake::run() {
  while (true) {
    const std::uint64_t now = monotonic_ns();
    if (const Status dialled = dial(); !dialled) return dialled.error();
    if (const Status accepted = accept(); !accepted) return accepted.error();
    if (made_ == peers_.size()) return std::move(peers_);
    if (now >= deadline_ns_) return log_timeout();
    wait(now);
  }
}

Status Handshake::dial() {
  KeyExchange& keys = listen_.listener.keys();
  for (auto next = dialled_.begin(); next != dialled_.end();) {
    const auto dialled = next++;
    if (!dialled->ready) continue;
    const wire::Secret& secret = handles_[dialled->rank].secret;
    const wire::Key& key = dialled->key;
    const Result<bool> replied = dialled->dial.advance([&] {
      dialled->attempt = listen_.attempt++;
      const wire::RmaHello own = hello(wire::listen_id(secret), dialled->attempt);
      std::vector<std::uint8_t> message = wire::with_mac(wire::encode_rma_hello(wire::MessageType::kConnect, own), key);
      dialled->hello_mac = wire::mac_of(message);
      return message;
    });
    if (!replied) return log_failure(*dialled, replied.error());
    if (!*replied) continue;
    const bool is_known = dialled->dial.reply().authenticate(key, dialled->hello_mac);
    const std::optional<wire::RmaHello> welcome = is_known ? read(dialled->dial.reply()) : std::nullopt;
    const std::optional<wire::Key> session =
        welcome && welcome->rank == dialled->rank
            ? keys.session_key(key, welcome->key, dialled->hello_mac, dialled->dial.reply().mac())
            : std::nullopt;
    if (!session) return log_failure(*dialled, {ErrorKind::kRemote, EPROTO, "handshake"});
    add_peer(*welcome, dialled->dial.take_socket(),
             {.connection = {wire::listen_id(secret), dialled->attempt}, .connecting = 1}, *session);
    dialled_.erase(dialled);
  }
  return {};
}

// An accepted connection that fails is forgotten: its rank connects again, or says why not.
Status Handshake::accept() {
  eventfd_t arrivals = 0;
  static_cast<void>(::eventfd_read(listen_.arrival.get(), &arrivals));
  Result<std::vector<ConnectRequest>> requests = listen_.listener.poll(listen_.id);
  if (!requests) return log("accepting connections on ", "", requests.error(), {});
  for (ConnectRequest& request : *requests) {
    if (!is_established(request.socket)) continue;  // the rank has given it up
    std::optional<wire::RmaHello> peer = read(request.hello);
    if (!peer || !expects(peer->rank)) {
      reject(request.socket,
             "rank " + std::to_string(rank_) + " of " + std::to_string(ranks()) + " does not expect it");
      continue;
    }
    const wire::Key key = listen_.listener.keys().hello_key(listen_.handle.secret);
    std::vector<std::uint8_t> welcome = wire::with_mac(
        wire::encode_rma_hello(wire::MessageType::kAccept, hello(listen_.id, peer->attempt)), key, request.hello.mac());
    const std::optional<wire::Key> session =
        listen_.listener.keys().session_key(key, peer->key, request.hello.mac(), wire::mac_of(welcome));
    if (!session) continue;
    accepted_.push_back({std::move(*peer), std::move(request.socket), OutgoingMessage(std::move(welcome)), *session});
  }
  for (auto next = accepted_.begin(); next != accepted_.end();) {
    const auto accepted = next++;
    const Result<bool> sent = accepted->welcome.send(accepted->socket);
    if (sent && !*sent) continue;
    if (sent) {
      add_peer(accepted->peer, std::move(accepted->socket),
               {.connection = {listen_.id, accepted->peer.attempt}, .connecting = 0}, accepted->session);
    }
    accepted_.erase(accepted);
  }
  return {};
}

std::optional<wire::RmaHello> Handshake::read(const IncomingMessage& message) const {
  Result<wire::RmaHello> hello = wire::decode_rma_hello(message.body());
  if (!hello || hello->ranks != ranks()) return std::nullopt;
  return std::move(*hello);
}

wire::RmaHello Handshake::hello(const wire::ListenId& listen, std::uint64_t attempt) const {
  return {.listen = listen,
          .attempt = attempt,
          .key = listen_.listener.keys().sent(),
          .ranks = ranks(),
          .rank = rank_,
          .pid = static_cast<std::uint32_t>(::getpid()),
          .host = process_.host_name,
          .addresses = listen_.listener.addresses(Listener::Use::kLook)};
}

void Handshake::add_peer(const wire::RmaHello& hello, UniqueFd socket, const wire::ConnectionEnd& own,
                         const wire::Key& session) {
  PeerRank& peer = peers_[(hello.rank + ranks() - rank_) % ranks() - 1];
  if (peer.channel != nullptr) return;  // two hellos of one rank
  peer.name = rank_name(hello);
  peer.host = hello.host;
  peer.channel = std::make_unique<PeerChannel>(channels_, std::move(socket), own, session, hello.addresses);
  ++made_;
}

void Handshake::wait(std::uint64_t now) {
  std::vector<pollfd> sockets;
  std::uint64_t until = std::min(deadline_ns_, now + kMaxWaitNs);
  for (const Dialled& dialled : dialled_) {
    sockets.push_back(dialled.dial.awaited());
    until = std::min(until, dialled.dial.next_ns());
  }
  for (const Accepted& accepted : accepted_) sockets.push_back({accepted.socket.get(), POLLOUT, 0});
  sockets.push_back({listen_.arrival.get(), POLLIN, 0});
  until = std::min(until, listen_.listener.await(sockets));
  const std::uint64_t left_ms = until > now ? (until - now) / kNanosecondsPerMillisecond + 1 : 0;
  static_cast<void>(::poll(sockets.data(), sockets.size(), static_cast<int>(left_ms)));
  std::size_t next = 0;
  for (Dialled& dialled : dialled_) {
    dialled.ready = sockets[next++].revents != 0 || until >= dialled.dial.next_ns();
  }
}

Error Handshake::log_failure(const Dialled& dialled, const Error& error) const {
  const wire::Handle& handle = handles_[dialled.rank];
  const std::string peer = "rank " + std::to_string(dialled.rank) + " at " + to_string(handle.address);
  return log("connecting ", " to " + peer, error,
             diagnose_dial(dialled.dial, error, peer, handle, process_.side_channel_name));
}

Error Handshake::log(const char* what, const std::string& peer, const Error& error, Diagnosis diagnosis) const {
  if (error.kind == ErrorKind::kSystem && diagnosis.next.empty())
    diagnosis.next = "look at the limits of the process (ulimit -n)";
  const Failure failure{what + listen_.port->name + " of " + process_.host_name + " (rank " + std::to_string(rank_) +
                            ", RMA)" + peer + " failed: " + to_string(error),
                        std::move(diagnosis)};
  VERBATIM_WARN("%s", log_line(failure).c_str());
  return {error.kind, error.sys_errno, error.operation, true};
}

std::string Handshake::missing() const {
  constexpr std::size_t kMaxNamed = 8;
  std::string names;
  std::size_t named = 0;
  for (const PeerRank& peer : peers_) {
    if (peer.channel != nullptr) continue;
    if (named++ == kMaxNamed) return names + ", ...";
    names += (names.empty() ? "" : ", ") + std::to_string(peer.rank);
  }
  return names;
}

Error Handshake::log_timeout() const {
  VERBATIM_WARN(
      "connecting %s of %s (rank %u of %u, RMA) failed: %zu ranks have not connected within %u s "
      "(VERBATIM_CONNECT_TIMEOUT_S): %s. Next: look at these ranks: all ranks call connect together",
      listen_.port->name.c_str(), process_.host_name.c_str(), rank_, ranks(), peers_.size() - made_,
      config_.connect_timeout_s, missing().c_str());
  return {ErrorKind::kRemote, ETIMEDOUT, "waiting for the other ranks", true};
}

}  // namespace verbatim::rma
