#include "rma/handshake.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/connect/hello_limits.h"
#include "net/diagnose/diagnosis.h"
#include "net/diagnose/failure.h"

namespace verbatim::rma {
namespace {

constexpr std::uint64_t kFirstPauseNs = 20 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kMaxPauseNs = kNanosecondsPerSecond;
constexpr std::uint64_t kMaxWaitMs = 1000;

std::string rank_name(const wire::RmaHello& hello) {
  return "rank " + std::to_string(hello.rank) + " on " + hello.host + " (pid " + std::to_string(hello.pid) + ")";
}

}  // namespace

Handshake::Handshake(const HandshakeSettings& settings, const UniqueFd& listener,
                     const std::vector<wire::Handle>& handles, std::uint32_t rank)
    : settings_(settings),
      listener_(listener),
      handles_(handles),
      rank_(rank),
      deadline_ns_(monotonic_ns() + settings.config.connect_timeout_s * kNanosecondsPerSecond),
      peers_(handles.size() - 1) {
  for (std::uint32_t distance = 1; distance < ranks(); ++distance) {
    peers_[distance - 1].rank = (rank_ + distance) % ranks();
    if (distance > connects()) continue;
    Attempt& attempt = attempts_.emplace_back();
    attempt.rank = peers_[distance - 1].rank;
    attempt.pause_ns = kFirstPauseNs;
  }
}

bool Handshake::expects(std::uint32_t rank) const {
  if (rank >= ranks() || rank == rank_) return false;
  const std::uint32_t distance = (rank + ranks() - rank_) % ranks();
  return distance > connects() && peers_[distance - 1].channel == nullptr;
}

Result<std::vector<PeerRank>> Handshake::run() {
  while (made_ < peers_.size()) {
    const std::uint64_t now = monotonic_ns();
    read_pending(now);
    for (auto attempt = attempts_.begin(); attempt != attempts_.end();) {
      if (!attempt->ready) {
        ++attempt;
        continue;
      }
      const Result<bool> made = advance(*attempt);
      if (!made && !survives(*attempt, made.error(), now)) {
        if (!attempt->accepted) return log_failure(*attempt, made.error());
        attempt = attempts_.erase(attempt);
        continue;
      }
      if (made && *made) add_peer(*attempt);
      attempt = made && *made ? attempts_.erase(attempt) : std::next(attempt);
    }
    if (made_ == peers_.size()) break;
    // After the others: many new connections must not displace a rank whose hello has arrived.
    if (const Status accepted = accept(); !accepted) return log_failure({}, accepted.error());
    if (now >= deadline_ns_) return log_timeout();
    wait(now);
  }
  return std::move(peers_);
}

Status Handshake::accept() {
  const std::uint64_t now = monotonic_ns();
  while (acceptable_ && !is_full(now)) {
    Result<std::optional<UniqueFd>> accepted = tcp_accept(listener_);
    if (!accepted) {
      const int why = accepted.error().sys_errno;
      if (why != EMFILE && why != ENFILE && why != ENOBUFS && why != ENOMEM) return accepted.error();
      return {};  // a shortage may pass
    }
    if (!accepted->has_value()) return {};
    if (pending_.size() == kMaxPending) drop(pending_.begin());
    Attempt& attempt = pending_.emplace_back();
    attempt.accepted = true;
    attempt.begun_ns = now;
    attempt.state = Attempt::State::kSendWelcome;
    attempt.socket = std::move(**accepted);
  }
  return {};
}

bool Handshake::is_full(std::uint64_t now) const {
  return pending_.size() == kMaxPending && now < pending_.front().begun_ns + kMinPendingNs;
}

void Handshake::read_pending(std::uint64_t now) {
  for (auto next = pending_.begin(); next != pending_.end();) {
    const auto pending = next++;
    const Result<bool> received = receive_hello(*pending);
    if (received && *received) {
      attempts_.splice(attempts_.end(), pending_, pending);
    } else if (!received) {
      pending_.erase(pending);
    } else if (now >= pending->begun_ns + kHelloTimeoutNs) {
      drop(pending);
    }
  }
}

void Handshake::drop(std::list<Attempt>::iterator pending) {
  close_with_reset(pending->socket);
  pending_.erase(pending);
}

Result<bool> Handshake::advance(Attempt& attempt) {
  while (true) {
    Result<bool> done = false;
    switch (attempt.state) {
      case Attempt::State::kWait:
        done = begin(attempt);
        break;
      case Attempt::State::kConnect:
        done = connected(attempt);
        break;
      case Attempt::State::kSendHello:
      case Attempt::State::kSendWelcome:
        done = attempt.outgoing.send(attempt.socket);
        break;
      case Attempt::State::kReceiveWelcome:
        done = receive(attempt, wire::RmaMessageType::kWelcome);
        break;
    }
    if (!done || !*done) return done;
    if (attempt.state == Attempt::State::kReceiveWelcome || attempt.state == Attempt::State::kSendWelcome) return true;
    if (attempt.state == Attempt::State::kSendHello) {
      attempt.is_late = monotonic_ns() - attempt.begun_ns > kMaxHelloDelayNs;
    }
    attempt.state = static_cast<Attempt::State>(static_cast<int>(attempt.state) + 1);
  }
}

Result<bool> Handshake::begin(Attempt& attempt) {
  const std::uint64_t now = monotonic_ns();
  if (now < attempt.next_ns) return false;
  attempt.begun_ns = now;
  Result<UniqueFd> socket = tcp_connect(handles_[attempt.rank].address, settings_.local_address);
  if (!socket) return socket.error();
  attempt.socket = std::move(*socket);
  return true;
}

Result<bool> Handshake::connected(Attempt& attempt) {
  const Result<bool> established = tcp_connected(attempt.socket);
  if (!established || !*established) return established;
  attempt.outgoing = OutgoingMessage(wire::encode_rma_hello(wire::RmaMessageType::kHello, hello_for(attempt.rank)));
  return true;
}

wire::RmaHello Handshake::hello_for(std::uint32_t rank) const {
  return {.secret = handles_[rank].secret,
          .ranks = ranks(),
          .rank = rank_,
          .pid = static_cast<std::uint32_t>(::getpid()),
          .host = settings_.host_name};
}

Result<bool> Handshake::receive(Attempt& attempt, wire::RmaMessageType type) {
  constexpr Error kProtocol{ErrorKind::kRemote, EPROTO, "handshake"};
  if (attempt.incoming.empty()) attempt.incoming.resize(wire::kHeaderBytes);
  while (true) {
    const Result<bool> all = receive_into(attempt.socket, attempt.incoming, attempt.filled);
    if (!all || !*all) return all;
    const Result<wire::RmaHeader> header = wire::decode_rma_header(
        std::span<const std::uint8_t, wire::kHeaderBytes>(attempt.incoming.data(), wire::kHeaderBytes));
    if (!header) return Error{ErrorKind::kRemote, EPROTO, header.error().operation};
    if (header->type != type || header->body_bytes > wire::kMaxRmaHelloBytes) return kProtocol;
    if (attempt.filled == wire::kHeaderBytes + header->body_bytes) break;
    attempt.incoming.resize(wire::kHeaderBytes + header->body_bytes);
  }
  Result<wire::RmaHello> hello = wire::decode_rma_hello(std::span(attempt.incoming).subspan(wire::kHeaderBytes));
  if (!hello || hello->secret != handles_[rank_].secret || hello->ranks != ranks()) return kProtocol;
  if (type == wire::RmaMessageType::kWelcome && hello->rank != attempt.rank) return kProtocol;
  attempt.peer = std::move(*hello);
  return true;
}

Result<bool> Handshake::receive_hello(Attempt& attempt) {
  const Result<bool> received = receive(attempt, wire::RmaMessageType::kHello);
  if (!received || !*received) return received;
  if (!expects(attempt.peer.rank)) return Error{ErrorKind::kRemote, EPROTO, "handshake"};
  attempt.rank = attempt.peer.rank;
  attempt.outgoing = OutgoingMessage(wire::encode_rma_hello(wire::RmaMessageType::kWelcome, hello_for(attempt.rank)));
  return true;
}

// A rank connects again, until the deadline, if its connection fails before its hello is sent, or is reset when that
// was late. An accepted connection that fails is forgotten: it may be that of another program.
bool Handshake::survives(Attempt& attempt, const Error& error, std::uint64_t now) {
  const bool before_hello = attempt.state < Attempt::State::kReceiveWelcome;
  const bool was_dropped = attempt.is_late && attempt.filled == 0 && error.sys_errno == ECONNRESET;
  if (attempt.accepted || !(was_dropped || (before_hello && is_passing(error)))) return false;
  attempt.socket.reset();
  attempt.state = Attempt::State::kWait;
  attempt.next_ns = now + attempt.pause_ns;
  attempt.pause_ns = std::min(2 * attempt.pause_ns, kMaxPauseNs);
  return now < deadline_ns_;
}

void Handshake::add_peer(Attempt& attempt) {
  PeerRank& peer = peers_[(attempt.rank + ranks() - rank_) % ranks() - 1];
  if (peer.channel != nullptr) return;  // two hellos of one rank
  peer.name = rank_name(attempt.peer);
  peer.host = attempt.peer.host;
  // Its end is the only sign of a host that has failed while nothing is put to it.
  if (settings_.config.keepalive_s != 0) set_keepalive(attempt.socket, settings_.config.keepalive_s);
  peer.channel = std::make_unique<Channel>(std::move(attempt.socket));
  ++made_;
}

void Handshake::wait(std::uint64_t now) {
  acceptable_ = is_full(now);  // once the oldest has had its time
  std::vector<pollfd> sockets{{acceptable_ ? -1 : listener_.get(), POLLIN, 0}};
  std::uint64_t until = deadline_ns_;
  if (acceptable_) until = std::min(until, pending_.front().begun_ns + kMinPendingNs);
  for (const Attempt& attempt : attempts_) {
    const bool receives = attempt.state == Attempt::State::kReceiveWelcome;
    // Of an attempt that waits there is no socket: -1, which poll ignores.
    sockets.push_back({attempt.socket.get(), static_cast<short>(receives ? POLLIN : POLLOUT), 0});
    if (attempt.state == Attempt::State::kWait) until = std::min(until, attempt.next_ns);
  }
  for (const Attempt& pending : pending_) sockets.push_back({pending.socket.get(), POLLIN, 0});
  const std::uint64_t left_ms = until > now ? (until - now) / kNanosecondsPerMillisecond + 1 : 0;
  static_cast<void>(::poll(sockets.data(), sockets.size(), static_cast<int>(std::min(left_ms, kMaxWaitMs))));
  acceptable_ = acceptable_ || sockets.front().revents != 0;
  std::size_t next = 1;
  for (Attempt& attempt : attempts_) {
    attempt.ready = sockets[next++].revents != 0 || attempt.state == Attempt::State::kWait;
  }
}

Error Handshake::log_failure(const Attempt& attempt, const Error& error) const {
  const std::string address = to_string(handles_[attempt.rank].address);
  const std::string peer = "rank " + std::to_string(attempt.rank) + " at " + address;
  Failure failure;
  failure.what = "connecting " + settings_.device + " of " + settings_.host_name + " (rank " + std::to_string(rank_) +
                 ", RMA) to " + peer + " failed: " + to_string(error);
  const bool connecting = attempt.state == Attempt::State::kWait || attempt.state == Attempt::State::kConnect;
  failure.diagnosis = connecting
                          ? diagnose_connect(error, peer, handles_[attempt.rank].address, settings_.side_channel_name)
                          : diagnose_handshake(error, peer, attempt.filled == 0);
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
      settings_.device.c_str(), settings_.host_name.c_str(), rank_, ranks(), peers_.size() - made_,
      settings_.config.connect_timeout_s, missing().c_str());
  return {ErrorKind::kRemote, ETIMEDOUT, "waiting for the other ranks", true};
}

}  // namespace verbatim::rma
