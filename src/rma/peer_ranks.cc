#include "rma/peer_ranks.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace verbatim::rma {
namespace {

constexpr std::uint64_t kMaxPollMs = 1000;

// Waits until one of the sockets has news.
void poll_until(std::vector<pollfd>& sockets, std::uint64_t deadline_ns) {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t left_ms = deadline_ns > now ? (deadline_ns - now) / kNanosecondsPerMillisecond + 1 : 0;
  static_cast<void>(::poll(sockets.data(), sockets.size(), static_cast<int>(std::min(left_ms, kMaxPollMs))));
}

}  // namespace

const char* call_name(wire::RmaCall call) {
  switch (call) {
    case wire::RmaCall::kOffer:
      return "creating contexts";
    case wire::RmaCall::kReady:
      return "connecting";
    case wire::RmaCall::kRegister:
      break;
  }
  return "registering memory";
}

Result<std::vector<wire::RmaExchange>> PeerRanks::exchange(wire::RmaCall call, wire::RmaOutcome outcome,
                                                           const Body& body) {
  const std::uint32_t sequence = next_sequence_++;
  const std::uint64_t deadline_ns = monotonic_ns() + timeout_s_ * kNanosecondsPerSecond;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    peers_[i].channel->send(wire::encode_rma_exchange({call, outcome, sequence, body(i)}));
  }
  std::vector<std::optional<wire::RmaExchange>> received(peers_.size());
  while (true) {
    std::vector<pollfd> sockets;
    const PeerRank* first_missing = nullptr;
    std::size_t missing = 0;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      Channel& channel = *peers_[i].channel;
      const bool flushed = channel.flush();
      if (!received[i]) channel.receive();
      while (!received[i]) {
        std::optional<wire::RmaExchange> next = channel.take();
        if (!next) break;
        if (next->sequence != sequence || next->call != call) return log_mismatch(peers_[i], call_name(call));
        if (next->outcome != wire::RmaOutcome::kRepeats) received[i] = std::move(next);
      }
      if (!received[i] && channel.end() != Channel::End::kOpen) return log_lost(peers_[i], call_name(call));
      if (received[i] && flushed) continue;
      if (missing++ == 0) first_missing = &peers_[i];
      const int events = (received[i] ? 0 : POLLIN) | (flushed ? 0 : POLLOUT);
      sockets.push_back({channel.fd(), static_cast<short>(events), 0});
    }
    if (missing == 0) break;
    if (monotonic_ns() >= deadline_ns) return log_timeout(missing, *first_missing, call_name(call));
    poll_until(sockets, deadline_ns);
  }
  std::vector<wire::RmaExchange> result;
  result.reserve(received.size());
  for (std::optional<wire::RmaExchange>& one : received) result.push_back(std::move(*one));
  return result;
}

void PeerRanks::announce_repeat(wire::RmaCall call) {
  for (const PeerRank& peer : peers_) {
    peer.channel->send(wire::encode_rma_exchange({call, wire::RmaOutcome::kRepeats, next_sequence_, {}}));
  }
}

bool PeerRanks::all_ended() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const PeerRank& peer) { return peer.channel->end() != Channel::End::kOpen; });
}

bool PeerRanks::wait_for_ends(std::uint64_t deadline_ns) const {
  while (true) {
    std::vector<pollfd> sockets;
    for (const PeerRank& peer : peers_) {
      peer.channel->receive();
      if (peer.channel->end() == Channel::End::kOpen) sockets.push_back({peer.channel->fd(), POLLIN, 0});
    }
    if (sockets.empty()) return true;
    if (monotonic_ns() >= deadline_ns) return false;
    poll_until(sockets, deadline_ns);
  }
}

Error PeerRanks::log_lost(const PeerRank& peer, const char* call) const {
  VERBATIM_WARN(
      "%s (RMA, rank %u of %u) failed: %s has ended its connection: %s. Next: look at %s first: its log says more",
      call, rank_, ranks(), peer.name.c_str(), peer.channel->reason().c_str(), peer.name.c_str());
  return {ErrorKind::kRemote, 0, "collective call", true};
}

Error PeerRanks::log_mismatch(const PeerRank& peer, const char* call) const {
  VERBATIM_WARN(
      "%s (RMA, rank %u of %u) failed: %s makes another collective call. Next: all ranks must make the same collective "
      "calls in the same order",
      call, rank_, ranks(), peer.name.c_str());
  return {ErrorKind::kUsage, 0, "collective call", true};
}

Error PeerRanks::log_timeout(std::size_t missing, const PeerRank& first, const char* call) const {
  VERBATIM_WARN(
      "%s (RMA, rank %u of %u) failed: %zu ranks have not made this collective call within %u s "
      "(VERBATIM_CONNECT_TIMEOUT_S), the first is %s. Next: look at these ranks",
      call, rank_, ranks(), missing, timeout_s_, first.name.c_str());
  return {ErrorKind::kRemote, ETIMEDOUT, "collective call", true};
}

}  // namespace verbatim::rma
