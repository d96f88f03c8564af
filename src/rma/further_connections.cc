#include "rma/further_connections.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "rma/channel.h"
#include "rma/handshake.h"

namespace verbatim::rma {
namespace {

constexpr std::uint64_t kLimitNs = kNanosecondsPerSecond;
constexpr Error kOther{ErrorKind::kRemote, EPROTO, "further connection"};

}  // namespace

Status FurtherConnections::run() {
  const std::size_t peers = ranks_.all().size();
  listen();
  std::vector<wire::Address> own;
  for (const UniqueFd& listener : listeners_) {
    if (const Result<sockaddr_storage> address = local_address(listener)) own.push_back(wire::to_address(*address));
  }
  tokens_.resize(peers);
  for (std::size_t peer = 0; peer < peers; ++peer) {
    if (const Status filled = fill_random(std::as_writable_bytes(std::span(tokens_[peer]))); !filled) own.clear();
  }
  const Result<std::vector<wire::RmaExchange>> received =
      ranks_.exchange(wire::RmaCall::kAddresses, wire::RmaOutcome::kDone, [&](std::size_t peer) {
        return wire::encode_rma_addresses({tokens_[peer], own});
      });
  if (!received) return received.error();
  const std::size_t connects = connects_to(ranks_.rank(), ranks_.ranks());
  for (std::size_t peer = 0; peer < peers; ++peer) {
    const Result<wire::RmaAddresses> theirs = wire::decode_rma_addresses((*received)[peer].body);
    if (!theirs) continue;
    if (peer >= connects) {
      expected_ += own.size();
      continue;
    }
    tokens_[peer] = theirs->token;  // that of the rank which accepts
    begin(peer, theirs->addresses);
  }
  const std::uint64_t deadline_ns = monotonic_ns() + kLimitNs;
  while (made_ < expected_ && monotonic_ns() < deadline_ns) {
    accept();
    advance_all();
    if (made_ < expected_) wait(deadline_ns);
  }
  if (made_ < expected_) {
    VERBATIM_INFO("RMA: rank %u has %zu of %zu further TCP connections: not all interfaces reach each other",
                  ranks_.rank(), made_, expected_);
  }
  for (Attempt& attempt : attempts_) close_with_reset(attempt.socket);
  return {};
}

void FurtherConnections::listen() {
  for (const SocketInterface& further : interfaces_.subspan(std::min<std::size_t>(interfaces_.size(), 1))) {
    if (listeners_.size() == wire::kMaxAddresses) return;
    Result<UniqueFd> listener = tcp_listen(further.address);
    if (listener) listeners_.push_back(std::move(*listener));
  }
}

void FurtherConnections::begin(std::size_t peer, const std::vector<wire::Address>& addresses) {
  expected_ += addresses.size();
  for (const wire::Address& address : addresses) {
    const sockaddr_storage remote = wire::to_sockaddr(address);
    // Not from the interface of the first connection, if another one is in the same subnet.
    const sockaddr_storage first = interfaces_.empty() ? sockaddr_storage{} : interfaces_.front().address;
    std::optional<sockaddr_storage> local = address_in_subnet_of(remote, interfaces_, first);
    if (!local) local = address_in_subnet_of(remote, interfaces_, {});
    Result<UniqueFd> socket = tcp_connect(remote, local.value_or(sockaddr_storage{}));
    if (!socket) {
      --expected_;
      continue;
    }
    const Token& token = tokens_[peer];
    attempts_.push_back({.peer = peer,
                         .socket = std::move(*socket),
                         .outgoing = OutgoingMessage(std::vector<std::uint8_t>(token.begin(), token.end()))});
  }
}

void FurtherConnections::accept() {
  for (const UniqueFd& listener : listeners_) {
    while (attempts_.size() <= 2 * expected_) {
      Result<std::optional<UniqueFd>> socket = tcp_accept(listener);
      if (!socket || !socket->has_value()) break;
      attempts_.push_back({.accepted = true, .established = true, .socket = std::move(**socket)});
    }
  }
}

bool FurtherConnections::find_peer(Attempt& attempt) const {
  const std::size_t connects = connects_to(ranks_.rank(), ranks_.ranks());
  for (std::size_t peer = connects; peer < tokens_.size(); ++peer) {
    if (tokens_[peer] != attempt.incoming) continue;
    attempt.peer = peer;
    return true;
  }
  return false;
}

// The one that connects sends the token first, the other one sends it back.
Result<bool> FurtherConnections::advance(Attempt& attempt) {
  if (!attempt.established) {
    const Result<bool> established = tcp_connected(attempt.socket);
    if (!established || !*established) return established;
    attempt.established = true;
  }
  for (const bool sends : {!attempt.accepted, attempt.accepted}) {
    if (sends && !attempt.sent) {
      const Result<bool> sent = attempt.outgoing.send(attempt.socket);
      if (!sent || !*sent) return sent;
      attempt.sent = true;
    }
    if (!sends && attempt.filled < attempt.incoming.size()) {
      const Result<bool> all = receive_into(attempt.socket, attempt.incoming, attempt.filled);
      if (!all || !*all) return all;
      if (!attempt.accepted) return attempt.incoming == tokens_[attempt.peer] ? Result<bool>(true) : kOther;
      if (!find_peer(attempt)) return kOther;
      attempt.outgoing = OutgoingMessage(std::vector<std::uint8_t>(attempt.incoming.begin(), attempt.incoming.end()));
    }
  }
  return true;
}

void FurtherConnections::advance_all() {
  for (Attempt& attempt : attempts_) {
    const Result<bool> made = advance(attempt);
    if (!made) {
      close_with_reset(attempt.socket);
      expected_ -= attempt.accepted ? 0U : 1U;
    } else if (*made) {
      if (config_.keepalive_s != 0) set_keepalive(attempt.socket, config_.keepalive_s);
      ranks_.all()[attempt.peer].channel->add(std::move(attempt.socket));
      ++made_;
    }
  }
  std::erase_if(attempts_, [](const Attempt& attempt) { return !attempt.socket; });
}

void FurtherConnections::wait(std::uint64_t deadline_ns) {
  std::vector<pollfd> sockets;
  for (const UniqueFd& listener : listeners_) sockets.push_back({listener.get(), POLLIN, 0});
  for (const Attempt& attempt : attempts_) {
    const bool receives =
        attempt.established && (attempt.accepted ? attempt.filled < attempt.incoming.size() : attempt.sent);
    sockets.push_back({attempt.socket.get(), static_cast<short>(receives ? POLLIN : POLLOUT), 0});
  }
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t left_ms = deadline_ns > now ? (deadline_ns - now) / kNanosecondsPerMillisecond + 1 : 0;
  static_cast<void>(::poll(sockets.data(), sockets.size(), static_cast<int>(left_ms)));
}

}  // namespace verbatim::rma
