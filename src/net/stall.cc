#include "net/stall.h"

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstdio>

namespace verbatim {
namespace {

using wire::View;

// What an application did last so long ago it does no more.
std::uint64_t lately_ns(const StallSettings& settings) {
  return 2 * settings.idle_period_ns();
}

Blame blame_for_sender(const View& mine, const std::optional<View>& peer) {
  if (mine.outstanding != 0) return (mine.flags & View::kPolls) != 0 ? Blame::kNetwork : Blame::kOwnApplication;
  if ((mine.flags & View::kWaits) == 0) return Blame::kNobody;
  if ((mine.flags & View::kCtsReady) != 0) return Blame::kPeerDiffers;
  if (!peer) return Blame::kPeerDoesNotTell;
  return static_cast<std::int32_t>(peer->members - mine.members) > 0 ? Blame::kCts : Blame::kPeerReceives;
}

Blame blame_for_receiver(const View& mine, const std::optional<View>& peer) {
  if (mine.flushes != 0) return (mine.flags & View::kPolls) != 0 ? Blame::kDevice : Blame::kOwnApplication;
  if (!peer) return Blame::kPeerDoesNotTell;
  const bool unsent = static_cast<std::int32_t>(mine.members - peer->members) > 0;
  // A sender that does not test does not notice that its data has been acknowledged.
  if (peer->outstanding != 0 && (!unsent || (peer->flags & View::kPolls) != 0)) return Blame::kNetwork;
  if (unsent) {
    if ((peer->flags & View::kWaits) == 0) return Blame::kPeerSends;
    return (peer->flags & View::kCtsReady) != 0 ? Blame::kPeerDiffers : Blame::kCts;
  }
  if (mine.outstanding == 0) return Blame::kNobody;
  return (mine.flags & View::kPolls) != 0 ? Blame::kCompletion : Blame::kOwnApplication;
}

const char* state_name(std::uint8_t state) {
  constexpr const char* kNames[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return state < std::size(kNames) ? kNames[state] : "unknown";
}

}  // namespace

Blame blame_for(const View& mine, const std::optional<View>& peer) {
  return mine.sends != 0 ? blame_for_sender(mine, peer) : blame_for_receiver(mine, peer);
}

bool is_ours(Blame blame) {
  return blame == Blame::kOwnApplication || blame == Blame::kCompletion || blame == Blame::kDevice;
}

void describe_blame(Blame blame, const char* peer, std::span<char> text) {
  const char* format = "nothing is outstanding%.0s";
  switch (blame) {
    case Blame::kNobody:
      break;
    case Blame::kPeerReceives:
      format = "the peer %s is late: its application has not posted the receive";
      break;
    case Blame::kPeerSends:
      format = "the peer %s is late: its application has not sent";
      break;
    case Blame::kPeerDiffers:
      format =
          "the applications differ: what this end and the peer %s want has not the same tag, or a message of a "
          "group is missing";
      break;
    case Blame::kOwnApplication:
      format = "this process is late: it does not ask whether what it exchanges with the peer %s is done";
      break;
    case Blame::kNetwork:
      format = "the network, or the device: data between this end and the peer %s was posted and is not acknowledged";
      break;
    case Blame::kCts:
      format =
          "the network, or the device: a receive (CTS) between this end and the peer %s was announced and has not "
          "come";
      break;
    case Blame::kCompletion:
      format = "the device: all data of the peer %s was acknowledged, and its completion has not come";
      break;
    case Blame::kDevice:
      format = "this host's device: a flush of GPU memory does not end (data of the peer %s)";
      break;
    case Blame::kPeerDoesNotTell:
      format = "the peer %s does not answer: its process is stopped or hangs, its host is down, or it is cut off";
      break;
  }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  std::snprintf(text.data(), text.size(), format, peer);
#pragma GCC diagnostic pop
}

void describe_next(Blame blame, const char* peer, const char* device, std::span<char> text) {
  constexpr const char* kStack = "'gdb -p' or 'py-spy dump -p' shows what its application does instead";
  switch (blame) {
    case Blame::kNobody:
      break;
    case Blame::kPeerReceives:
    case Blame::kPeerSends:
      std::snprintf(text.data(), text.size(), "look at %s first: %s", peer, kStack);
      return;
    case Blame::kOwnApplication:
      std::snprintf(text.data(), text.size(), "look at this process first: %s", kStack);
      return;
    case Blame::kPeerDiffers:
      std::snprintf(text.data(), text.size(), "compare the calls of this process and of %s: order, tags, groups", peer);
      return;
    case Blame::kNetwork:
    case Blame::kCts:
      std::snprintf(text.data(), text.size(), "'rdma statistic show' and 'dmesg | grep %s' here, the same at %s",
                    device, peer);
      return;
    case Blame::kCompletion:
    case Blame::kDevice:
      std::snprintf(text.data(), text.size(), "'dmesg | grep %s'", device);
      return;
    case Blame::kPeerDoesNotTell:
      std::snprintf(text.data(), text.size(), "look at %s first: 'ping' and 'ps' show whether it is there and runs",
                    peer);
      return;
  }
  std::snprintf(text.data(), text.size(), "nothing");
}

void describe_qp_state(std::uint8_t state, std::span<char> text) {
  std::snprintf(text.data(), text.size(), "%s", state_name(state));
}

void describe_view(const View& view, std::span<char> text) {
  const unsigned long long bytes = view.bytes;
  const bool polls = (view.flags & View::kPolls) != 0;
  int written = 0;
  if (view.sends != 0) {
    written = std::snprintf(text.data(), text.size(),
                            "%u messages (%llu bytes) sent, %u work requests not completed%s, isend %s, QPs in %s",
                            view.members, bytes, view.outstanding,
                            view.outstanding == 0 ? ""
                            : polls               ? " and tested for"
                                                  : " and not tested for",
                            (view.flags & View::kWaits) == 0      ? "not called"
                            : (view.flags & View::kCtsReady) != 0 ? "called, no receive of its tag"
                                                                  : "called, no receive",
                            state_name(view.qp_state));
  } else {
    written = std::snprintf(text.data(), text.size(),
                            "%u receives posted (%llu bytes came), %u not arrived%s, %u flushes, QPs in %s",
                            view.members, bytes, view.outstanding,
                            view.outstanding == 0 ? ""
                            : polls               ? " and tested for"
                                                  : " and not tested for",
                            view.flushes, state_name(view.qp_state));
  }
  if (view.still_ms == 0 || written < 0 || static_cast<std::size_t>(written) >= text.size()) return;
  text = text.subspan(static_cast<std::size_t>(written));
  std::snprintf(text.data(), text.size(), ", still for %.1f s", static_cast<double>(view.still_ms) / 1000);
}

std::uint64_t StallSettings::first_ns() const {
  constexpr std::uint64_t kUsualNs = 30 * kNanosecondsPerSecond;
  if (warn_ns == 0 && fail_ns == 0) return kUsualNs;
  if (warn_ns == 0 || fail_ns == 0) return std::max(warn_ns, fail_ns);
  return std::min(warn_ns, fail_ns);
}

std::uint64_t StallSettings::busy_period_ns() const {
  return std::clamp(first_ns() / 16, 20 * kNanosecondsPerMillisecond, kNanosecondsPerSecond);
}

std::uint64_t StallSettings::idle_period_ns() const {
  return std::clamp(first_ns() / 8, 20 * kNanosecondsPerMillisecond, 4 * kNanosecondsPerSecond);
}

StallWatch::Step StallWatch::look(const StallSettings& settings, std::uint64_t now, const View& view, bool waits,
                                  bool polls) {
  // Time in which nobody looked, because this process was stopped, counts for nothing: its application stood as well.
  const std::uint64_t longest_gap = std::max(4 * settings.idle_period_ns(), kNanosecondsPerSecond);
  if (looked_ns_ != 0 && now - looked_ns_ > longest_gap) {
    since_ns_ += now - looked_ns_;
    asked_ns_ = 0;
  }
  looked_ns_ = now;
  if (waits) waited_ns_ = now;
  if (polls) polled_ns_ = now;
  const std::uint64_t lately = lately_ns(settings);
  const View before = mine_;
  mine_ = view;
  if (waited_ns_ != 0 && now - waited_ns_ <= lately) mine_.flags |= View::kWaits;
  if (polled_ns_ != 0 && now - polled_ns_ <= lately) mine_.flags |= View::kPolls;
  const bool unheard_of = (view.flags & View::kOptional) != 0 && view.members != settled_members_;
  const bool owes = view.outstanding != 0 || view.flushes != 0 || unheard_of ||
                    (view.sends != 0 && (mine_.flags & View::kWaits) != 0);
  const bool moved = view.members != before.members || view.outstanding != before.outstanding ||
                     view.flushes != before.flushes || owes != owes_;
  owes_ = owes;
  if (moved || !owes) {
    const bool again = reported_;
    stood_ns_ = now - since_ns_;
    since_ns_ = now;
    asked_ns_ = 0;
    reported_ = false;
    return again ? Step::kMovesAgain : Step::kNothing;
  }
  mine_.still_ms = static_cast<std::uint32_t>((now - since_ns_) / kNanosecondsPerMillisecond);
  const std::uint64_t still = now - since_ns_;
  const bool fails = settings.fail_ns != 0 && still >= settings.fail_ns;
  const bool warns = settings.warn_ns != 0 && still >= settings.warn_ns && !reported_;
  if (!fails && !warns) return Step::kNothing;
  if (asked_ns_ == 0) {
    asked_ns_ = now;
    ++question_;
    peer_.reset();
    return Step::kAsk;
  }
  if (!peer_ && now - asked_ns_ < kAnswerNs) return Step::kNothing;
  asked_ns_ = 0;
  // Of optional receives only the peer knows; that it does not say is no stall while nobody waits for it.
  if (!peer_ && view.outstanding == 0 && view.flushes == 0 && (mine_.flags & View::kWaits) == 0) return Step::kNothing;
  if (blame() == Blame::kNobody) {  // of optional receives the peer knows
    settled_members_ = view.members;
    return Step::kNothing;
  }
  if (fails) return Step::kFail;
  reported_ = true;
  return Step::kReport;
}

bool StallWatch::hear(const View& peer) {
  if (asked_ns_ == 0 || peer.id != question_ || peer.sends == mine_.sends) return false;
  peer_ = peer;
  return true;
}

}  // namespace verbatim
