#include "rma/peer_ranks.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace verbatim::rma {
namespace {

// "creating contexts", for messages.
const char* call_name(wire::RmaCall call) {
  switch (call) {
    case wire::RmaCall::kOffer:
    case wire::RmaCall::kConnected:
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

// A thread that waits is woken once, not for each of the other ranks.
void PeerRanks::channel_changed(const PeerRank& peer) {
  const MutexLock lock(mutex_);
  if (call_) take(peer);
  if (!call_ || is_over()) changed_.notify_all();
}

bool PeerRanks::is_over() const {
  if (!call_) return all_ended();
  return call_->count == peers_.size() || call_->lost != nullptr || call_->differs != nullptr || failures_.has_failed();
}

void PeerRanks::wait(std::uint64_t deadline_ns) const {
  const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  changed_.wait_until(mutex_, deadline, [this]() VERBATIM_REQUIRES(mutex_) { return is_over(); });
}

// Takes what has come. Others may end because one has: the first one counts.
void PeerRanks::take(const PeerRank& peer) {
  const bool ended = peer.channel->end() != PeerChannel::End::kOpen;  // what came before it is there
  const auto index = static_cast<std::size_t>(&peer - peers_.data());
  while (!call_->has[index]) {
    std::optional<wire::RmaExchange> next = peer.channel->take();
    if (!next) break;
    if (next->sequence != call_->sequence || next->call != call_->call) call_->differs = &peer;
    if (next->outcome == wire::RmaOutcome::kRepeats) continue;
    call_->received[index] = std::move(*next);
    call_->has[index] = true;
    ++call_->count;
  }
  if (!call_->has[index] && ended && call_->lost == nullptr) call_->lost = &peer;
}

Result<std::vector<wire::RmaExchange>> PeerRanks::exchange(wire::RmaCall call,
                                                           const std::optional<std::string>& failure,
                                                           const Body& body) {
  if (failures_.has_failed()) return failed_already();
  const std::uint32_t sequence = next_sequence_++;
  const std::uint64_t deadline_ns = monotonic_ns() + timeout_s_ * kNanosecondsPerSecond;
  const wire::RmaOutcome outcome = failure ? wire::RmaOutcome::kFailed : wire::RmaOutcome::kDone;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const std::vector<std::uint8_t> sent = failure ? wire::encode_rma_text(*failure) : body(i);
    peers_[i].channel->send(wire::encode_rma_exchange({call, outcome, sequence, sent}));
  }
  Call own{call, sequence, std::vector<wire::RmaExchange>(peers_.size()), std::vector<bool>(peers_.size())};
  {
    const MutexLock lock(mutex_);
    call_ = std::move(own);
    for (const PeerRank& peer : peers_) take(peer);
    wait(deadline_ns);
    own = *std::exchange(call_, std::nullopt);
  }
  if (own.differs != nullptr) return fail_mismatch(*own.differs, call);
  if (own.lost != nullptr) return fail_lost(*own.lost, call);
  if (own.count != peers_.size()) return failures_.has_failed() ? failed_already() : fail_timeout(own);
  for (std::size_t i = 0; !failure && i < peers_.size(); ++i) {
    if (own.received[i].outcome == wire::RmaOutcome::kDone) continue;
    return log_failure(peers_[i], call,
                       "it failed at " + peers_[i].name + ": " + wire::decode_rma_text(own.received[i].body));
  }
  return std::move(own.received);
}

Error PeerRanks::log_failure(const PeerRank& peer, wire::RmaCall call, const std::string& because) const {
  VERBATIM_WARN("%s because %s. Next: look at %s first", failed_call(call).c_str(), because.c_str(), peer.name.c_str());
  return {ErrorKind::kRemote, 0, "collective call", true};
}

void PeerRanks::announce_repeat(wire::RmaCall call) {
  for (const PeerRank& peer : peers_) {
    peer.channel->send(wire::encode_rma_exchange({call, wire::RmaOutcome::kRepeats, next_sequence_, {}}));
  }
}

bool PeerRanks::all_ended() const {
  return std::ranges::all_of(peers_, [](const PeerRank& peer) { return peer.channel->is_over(); });
}

void PeerRanks::wait_for_ends(std::uint64_t deadline_ns) const {
  const MutexLock lock(mutex_);
  wait(deadline_ns);
}

std::string PeerRanks::failed_call(wire::RmaCall call) const {
  return std::string(call_name(call)) + " (RMA, rank " + std::to_string(rank_) + " of " + std::to_string(ranks()) +
         ") failed";
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
      return Failure{failed_call(call) + ": the channel to " + peer.name + " is lost: " + peer.channel->reason(),
                     {"", "look at the network between the hosts (VERBATIM_SOCKET_IFNAME), and at " + peer.name}};
    }
    return Failure{failed_call(call) + ": " + peer.name + " has ended its connection: " + peer.channel->reason(),
                   {"", "look at " + peer.name + " first: its log says more"}};
  });
  return {failures_.kind(), 0, "collective call", true};
}

Error PeerRanks::fail_mismatch(const PeerRank& peer, wire::RmaCall call) {
  failures_.fail(ErrorKind::kUsage, Failures::Origin::kHere, [&] {
    return Failure{failed_call(call) + ": " + peer.name + " makes another collective call",
                   {"", "all ranks must make the same collective calls in the same order"}};
  });
  return {failures_.kind(), 0, "collective call", true};
}

Error PeerRanks::fail_timeout(const Call& call) {
  const auto first = static_cast<std::size_t>(std::ranges::find(call.has, false) - call.has.begin());
  failures_.fail(ErrorKind::kRemote, Failures::Origin::kHere, [&] {
    return Failure{failed_call(call.call) + ": " + std::to_string(peers_.size() - call.count) +
                       " ranks have not made this collective call within " + std::to_string(timeout_s_) +
                       " s (VERBATIM_CONNECT_TIMEOUT_S), the first is " + peers_[first].name,
                   {"", "look at these ranks"}};
  });
  return {failures_.kind(), ETIMEDOUT, "collective call", true};
}

}  // namespace verbatim::rma
