#include "rma/peer_ranks.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace verbatim::rma {
namespace {

constexpr std::uint64_t kMaxPollMs = 1000;

// Waits until one of the sockets has an event.
void poll_until(std::vector<pollfd>& sockets, std::uint64_t deadline_ns) {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t left_ms = deadline_ns > now ? (deadline_ns - now) / kNanosecondsPerMillisecond + 1 : 0;
  static_cast<void>(::poll(sockets.data(), sockets.size(), static_cast<int>(std::min(left_ms, kMaxPollMs))));
}

// "creating contexts", for messages.
const char* call_name(wire::RmaCall call) {
  switch (call) {
    case wire::RmaCall::kOffer:
      return "creating contexts";
    case wire::RmaCall::kReady:
    case wire::RmaCall::kAddresses:
      return "connecting";
    case wire::RmaCall::kRegister:
      break;
  }
  return "registering memory";
}

}  // namespace

PeerRanks::PeerRanks(std::vector<PeerRank> peers, std::uint32_t rank, unsigned timeout_s, Failures& failures,
                     Received received)
    : peers_(std::move(peers)),
      rank_(rank),
      timeout_s_(timeout_s),
      failures_(failures),
      received_(std::move(received)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void PeerRanks::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));  // a full counter wakes too
}

Result<std::vector<wire::RmaExchange>> PeerRanks::exchange(wire::RmaCall call, wire::RmaOutcome outcome,
                                                           const Body& body) {
  if (failures_.has_failed()) return Error{failures_.kind(), 0, "collective call after a failure", true};
  const std::uint32_t sequence = next_sequence_++;
  const std::uint64_t deadline_ns = monotonic_ns() + timeout_s_ * kNanosecondsPerSecond;
  std::vector<Awaited> awaited(peers_.size());
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    awaited[i].peer = &peers_[i];
    peers_[i].channel->send(wire::encode_rma_exchange({call, outcome, sequence, body(i)}));
  }
  std::size_t left = awaited.size();
  while (true) {
    for (Awaited& one : awaited) {
      if (!one.ready || one.is_complete()) continue;
      if (const Status read = advance(one, call, sequence); !read) return read.error();
      left -= one.is_complete() ? 1U : 0U;
    }
    if (left == 0) break;
    if (monotonic_ns() >= deadline_ns) {
      const auto first =
          std::find_if(awaited.begin(), awaited.end(), [](const Awaited& one) { return !one.is_complete(); });
      return fail_timeout(left, *first->peer, call);
    }
    wait(awaited, deadline_ns);
  }
  std::vector<wire::RmaExchange> result;
  result.reserve(awaited.size());
  for (Awaited& one : awaited) result.push_back(std::move(*one.received));
  return result;
}

// Sends what is left to send, and reads what has arrived.
Status PeerRanks::advance(Awaited& one, wire::RmaCall call, std::uint32_t sequence) {
  Channel& channel = *one.peer->channel;
  one.sent = channel.flush();
  if (!one.received) {
    channel.receive();
    received_(*one.peer);
  }
  while (!one.received) {
    std::optional<wire::RmaExchange> next = channel.take();
    if (!next) break;
    if (next->sequence != sequence || next->call != call) return fail_mismatch(*one.peer, call);
    if (next->outcome != wire::RmaOutcome::kRepeats) one.received = std::move(next);
  }
  if (!one.is_complete() && channel.end() != Channel::End::kOpen) return fail_lost(*one.peer, call);
  return {};
}

void PeerRanks::wait(std::vector<Awaited>& awaited, std::uint64_t deadline_ns) const {
  std::vector<pollfd> sockets;
  for (const Awaited& one : awaited) {
    const int events = (one.received ? 0 : POLLIN) | (one.sent ? 0 : POLLOUT);
    sockets.push_back({one.is_complete() ? -1 : one.peer->channel->open_fd(), static_cast<short>(events), 0});
  }
  sockets.push_back({wake_.get(), POLLIN, 0});
  poll_until(sockets, deadline_ns);
  std::uint64_t wakes = 0;
  const bool woken = sockets.back().revents != 0 && ::read(wake_.get(), &wakes, sizeof wakes) > 0;
  // The monitor may have read a message: then, and when poll has found no socket with an event, all are looked at
  // again.
  const bool any = std::any_of(sockets.begin(), sockets.end(), [](const pollfd& one) { return one.revents != 0; });
  for (std::size_t i = 0; i < awaited.size(); ++i) awaited[i].ready = woken || !any || sockets[i].revents != 0;
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
      if (peer.channel->end() == Channel::End::kOpen) sockets.push_back({peer.channel->open_fd(), POLLIN, 0});
    }
    if (sockets.empty()) return true;
    if (monotonic_ns() >= deadline_ns) return false;
    poll_until(sockets, deadline_ns);
  }
}

std::string PeerRanks::failed_call(wire::RmaCall call) const {
  return std::string(call_name(call)) + " (RMA, rank " + std::to_string(rank_) + " of " + std::to_string(ranks()) +
         ") failed: ";
}

// A rank that has failed, or whose connection was lost, says so to the others or has ended for them too.
Error PeerRanks::fail_lost(const PeerRank& peer, wire::RmaCall call) {
  const bool closed = peer.channel->end() == Channel::End::kClosed;
  failures_.fail(ErrorKind::kRemote, closed ? Failures::Origin::kHere : Failures::Origin::kOtherRank, [&] {
    return Failure{failed_call(call) + peer.name + " has ended its connection: " + peer.channel->reason(),
                   {"", "look at " + peer.name + " first: its log says more"}};
  });
  return {failures_.kind(), 0, "collective call", true};
}

Error PeerRanks::fail_mismatch(const PeerRank& peer, wire::RmaCall call) {
  failures_.fail(ErrorKind::kUsage, Failures::Origin::kHere, [&] {
    return Failure{failed_call(call) + peer.name + " makes another collective call",
                   {"", "all ranks must make the same collective calls in the same order"}};
  });
  return {failures_.kind(), 0, "collective call", true};
}

Error PeerRanks::fail_timeout(std::size_t missing, const PeerRank& first, wire::RmaCall call) {
  failures_.fail(ErrorKind::kRemote, Failures::Origin::kHere, [&] {
    return Failure{failed_call(call) + std::to_string(missing) + " ranks have not made this collective call within " +
                       std::to_string(timeout_s_) + " s (VERBATIM_CONNECT_TIMEOUT_S), the first is " + first.name,
                   {"", "look at these ranks"}};
  });
  return {failures_.kind(), ETIMEDOUT, "collective call", true};
}

}  // namespace verbatim::rma
