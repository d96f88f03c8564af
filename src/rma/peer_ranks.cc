#include "rma/peer_ranks.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace verbatim::rma {
namespace {

// "creating contexts", for messages.
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

}  // namespace

PeerRanks::PeerRanks(std::vector<PeerRank> peers, std::uint32_t rank, unsigned timeout_s, Failures& failures)
    : peers_(std::move(peers)), rank_(rank), timeout_s_(timeout_s), failures_(failures) {}

void PeerRanks::channel_changed() {
  const MutexLock lock(mutex_);
  ++changes_;
  changed_.notify_all();
}

std::uint64_t PeerRanks::changes() const {
  const MutexLock lock(mutex_);
  return changes_;
}

void PeerRanks::wait(std::uint64_t changes, std::uint64_t deadline_ns) const {
  const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  const MutexLock lock(mutex_);
  changed_.wait_until(mutex_, deadline, [&]() VERBATIM_REQUIRES(mutex_) { return changes_ != changes; });
}

Result<std::vector<wire::RmaExchange>> PeerRanks::exchange(wire::RmaCall call, wire::RmaOutcome outcome,
                                                           const Body& body) {
  if (failures_.has_failed()) return failed_already();
  const std::uint32_t sequence = next_sequence_++;
  const std::uint64_t deadline_ns = monotonic_ns() + timeout_s_ * kNanosecondsPerSecond;
  std::vector<Awaited> awaited(peers_.size());
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    awaited[i].peer = &peers_[i];
    peers_[i].channel->send(wire::encode_rma_exchange({call, outcome, sequence, body(i)}));
  }
  while (true) {
    const std::uint64_t seen = changes();
    std::size_t left = 0;
    const PeerRank* first = nullptr;
    for (Awaited& one : awaited) {
      if (one.received) continue;
      if (const Status read = advance(one, call, sequence); !read) return read.error();
      if (one.received) continue;
      if (left++ == 0) first = one.peer;
    }
    if (left == 0) break;
    if (failures_.has_failed()) return failed_already();
    if (monotonic_ns() >= deadline_ns) return fail_timeout(left, *first, call);
    wait(seen, deadline_ns);
  }
  std::vector<wire::RmaExchange> result;
  result.reserve(awaited.size());
  for (Awaited& one : awaited) result.push_back(std::move(*one.received));
  return result;
}

// Takes what has come.
Status PeerRanks::advance(Awaited& one, wire::RmaCall call, std::uint32_t sequence) {
  PeerChannel& channel = *one.peer->channel;
  const bool ended = channel.end() != PeerChannel::End::kOpen;  // what came before it is there
  while (!one.received) {
    std::optional<wire::RmaExchange> next = channel.take();
    if (!next) break;
    if (next->sequence != sequence || next->call != call) return fail_mismatch(*one.peer, call);
    if (next->outcome != wire::RmaOutcome::kRepeats) one.received = std::move(next);
  }
  if (!one.received && ended) return fail_lost(*one.peer, call);
  return {};
}

void PeerRanks::announce_repeat(wire::RmaCall call) {
  for (const PeerRank& peer : peers_) {
    peer.channel->send(wire::encode_rma_exchange({call, wire::RmaOutcome::kRepeats, next_sequence_, {}}));
  }
}

bool PeerRanks::all_ended() const {
  return std::ranges::all_of(peers_, [](const PeerRank& peer) { return peer.channel->is_over(); });
}

bool PeerRanks::wait_for_ends(std::uint64_t deadline_ns) const {
  while (true) {
    const std::uint64_t seen = changes();
    if (all_ended()) return true;
    if (monotonic_ns() >= deadline_ns) return false;
    wait(seen, deadline_ns);
  }
}

std::string PeerRanks::failed_call(wire::RmaCall call) const {
  return std::string(call_name(call)) + " (RMA, rank " + std::to_string(rank_) + " of " + std::to_string(ranks()) +
         ") failed: ";
}

Error PeerRanks::failed_already() const {
  return {failures_.kind(), 0, "collective call after a failure", true};
}

// A rank that has failed says so to the others, and all find out that a process has ended.
Error PeerRanks::fail_lost(const PeerRank& peer, wire::RmaCall call) {
  const PeerChannel::End end = peer.channel->end();
  const bool is_known = end == PeerChannel::End::kFailed || end == PeerChannel::End::kEnded;
  failures_.fail(ErrorKind::kRemote, is_known ? Failures::Origin::kOtherRank : Failures::Origin::kHere, [&] {
    if (end == PeerChannel::End::kLost) {
      return Failure{failed_call(call) + "the channel to " + peer.name + " is lost: " + peer.channel->reason(),
                     {"", "look at the network between the hosts (VERBATIM_SOCKET_IFNAME), and at " + peer.name}};
    }
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
