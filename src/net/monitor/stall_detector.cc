#include "net/monitor/stall_detector.h"

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstdio>

namespace verbatim {
namespace {

using wire::ConnectionStatus;

// What the application has not done for longer than this counts as not done.
std::uint64_t recent_ns(const StallSettings& settings) {
  return 2 * settings.idle_period_ns();
}

StallCause find_sender_cause(const ConnectionStatus& local_status, const std::optional<ConnectionStatus>& peer) {
  if (local_status.outstanding != 0)
    return (local_status.flags & ConnectionStatus::kTested) != 0 ? StallCause::kNetwork : StallCause::kOwnApplication;
  if ((local_status.flags & ConnectionStatus::kSendRefused) == 0) return StallCause::kNone;
  if ((local_status.flags & ConnectionStatus::kCtsReady) != 0) return StallCause::kMismatchedCalls;
  if (!peer) return StallCause::kPeerDoesNotReply;
  return static_cast<std::int32_t>(peer->members - local_status.members) > 0 ? StallCause::kCtsNotReceived
                                                                             : StallCause::kPeerPostsNoReceive;
}

StallCause find_receiver_cause(const ConnectionStatus& local_status, const std::optional<ConnectionStatus>& peer) {
  if (local_status.flushes != 0)
    return (local_status.flags & ConnectionStatus::kTested) != 0 ? StallCause::kFlushNotCompleted
                                                                 : StallCause::kOwnApplication;
  if (!peer) return StallCause::kPeerDoesNotReply;
  const bool unsent = static_cast<std::int32_t>(local_status.members - peer->members) > 0;
  // A sender that does not test does not notice that its data has been acknowledged.
  if (peer->outstanding != 0 && (!unsent || (peer->flags & ConnectionStatus::kTested) != 0))
    return StallCause::kNetwork;
  if (unsent) {
    if ((peer->flags & ConnectionStatus::kSendRefused) == 0) return StallCause::kPeerSendsNothing;
    return (peer->flags & ConnectionStatus::kCtsReady) != 0 ? StallCause::kMismatchedCalls
                                                            : StallCause::kCtsNotReceived;
  }
  if (local_status.outstanding == 0) return StallCause::kNone;
  return (local_status.flags & ConnectionStatus::kTested) != 0 ? StallCause::kCompletionNotReceived
                                                               : StallCause::kOwnApplication;
}

const char* state_name(std::uint8_t state) {
  constexpr const char* kNames[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return state < std::size(kNames) ? kNames[state] : "unknown";
}

}  // namespace

StallCause find_stall_cause(const ConnectionStatus& local_status, const std::optional<ConnectionStatus>& peer) {
  return local_status.sends != 0 ? find_sender_cause(local_status, peer) : find_receiver_cause(local_status, peer);
}

bool is_local(StallCause cause) {
  return cause == StallCause::kOwnApplication || cause == StallCause::kCompletionNotReceived ||
         cause == StallCause::kFlushNotCompleted;
}

void describe_stall_cause(StallCause cause, const char* peer, std::span<char> text) {
  const char* format = "nothing is outstanding%.0s";
  switch (cause) {
    case StallCause::kNone:
      break;
    case StallCause::kPeerPostsNoReceive:
      format = "the peer %s is late: its application has not posted the receive";
      break;
    case StallCause::kPeerSendsNothing:
      format = "the peer %s is late: its application has not sent";
      break;
    case StallCause::kMismatchedCalls:
      format =
          "the calls of the applications differ: this end and the peer %s use different tags, or a message of a group "
          "is "
          "missing";
      break;
    case StallCause::kOwnApplication:
      format = "this process is late: its application does not test its requests for the peer %s";
      break;
    case StallCause::kNetwork:
      format = "the network, or the device: data between this end and the peer %s was posted and is not acknowledged";
      break;
    case StallCause::kCtsNotReceived:
      format =
          "the network, or the device: the CTS entry of a receive between this end and the peer %s was written and has "
          "not arrived";
      break;
    case StallCause::kCompletionNotReceived:
      format = "the device: all data of the peer %s was acknowledged, and the completion has not arrived";
      break;
    case StallCause::kFlushNotCompleted:
      format = "this host's device: a flush of GPU memory does not complete (data of the peer %s)";
      break;
    case StallCause::kPeerDoesNotReply:
      format = "the peer %s does not answer: its process is stopped or hangs, its host is down, or it is cut off";
      break;
  }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  std::snprintf(text.data(), text.size(), format, peer);
#pragma GCC diagnostic pop
}

void describe_next_step(StallCause cause, const char* peer, const char* device, std::span<char> text) {
  constexpr const char* kStack = "'gdb -p' or 'py-spy dump -p' shows what its application does";
  switch (cause) {
    case StallCause::kNone:
      break;
    case StallCause::kPeerPostsNoReceive:
    case StallCause::kPeerSendsNothing:
      std::snprintf(text.data(), text.size(), "look at %s first: %s", peer, kStack);
      return;
    case StallCause::kOwnApplication:
      std::snprintf(text.data(), text.size(), "look at this process first: %s", kStack);
      return;
    case StallCause::kMismatchedCalls:
      std::snprintf(text.data(), text.size(), "compare the calls of this process and of %s: order, tags, groups", peer);
      return;
    case StallCause::kNetwork:
    case StallCause::kCtsNotReceived:
      std::snprintf(text.data(), text.size(),
                    "'rdma statistic show' and 'dmesg | grep %s' on this host, the same at %s", device, peer);
      return;
    case StallCause::kCompletionNotReceived:
    case StallCause::kFlushNotCompleted:
      std::snprintf(text.data(), text.size(), "'dmesg | grep %s'", device);
      return;
    case StallCause::kPeerDoesNotReply:
      std::snprintf(text.data(), text.size(),
                    "look at %s first: 'ping' and 'ps' show whether it can be reached and runs", peer);
      return;
  }
  std::snprintf(text.data(), text.size(), "nothing");
}

void describe_qp_state(std::uint8_t state, std::span<char> text) {
  std::snprintf(text.data(), text.size(), "%s", state_name(state));
}

void describe_status(const ConnectionStatus& status, std::span<char> text) {
  const unsigned long long bytes = status.bytes;
  const bool tested = (status.flags & ConnectionStatus::kTested) != 0;
  int written = 0;
  if (status.sends != 0) {
    written = std::snprintf(text.data(), text.size(),
                            "%u messages (%llu bytes) sent, %u work requests not completed%s, isend %s, QPs in %s",
                            status.members, bytes, status.outstanding,
                            status.outstanding == 0 ? ""
                            : tested                ? " and tested"
                                                    : " and not tested",
                            (status.flags & ConnectionStatus::kSendRefused) == 0 ? "not called"
                            : (status.flags & ConnectionStatus::kCtsReady) != 0  ? "called, no CTS entry with its tag"
                                                                                 : "called, no CTS entry",
                            state_name(status.qp_state));
  } else {
    written = std::snprintf(text.data(), text.size(),
                            "%u receives posted (%llu bytes received), %u not arrived%s, %u flushes, QPs in %s",
                            status.members, bytes, status.outstanding,
                            status.outstanding == 0 ? ""
                            : tested                ? " and tested"
                                                    : " and not tested",
                            status.flushes, state_name(status.qp_state));
  }
  if (status.no_progress_ms == 0 || written < 0 || static_cast<std::size_t>(written) >= text.size()) return;
  text = text.subspan(static_cast<std::size_t>(written));
  std::snprintf(text.data(), text.size(), ", no progress for %.1f s",
                static_cast<double>(status.no_progress_ms) / 1000);
}

std::uint64_t StallSettings::first_deadline_ns() const {
  constexpr std::uint64_t kUsualNs = 30 * kNanosecondsPerSecond;
  if (warn_ns == 0 && fail_ns == 0) return kUsualNs;
  if (warn_ns == 0 || fail_ns == 0) return std::max(warn_ns, fail_ns);
  return std::min(warn_ns, fail_ns);
}

std::uint64_t StallSettings::busy_period_ns() const {
  return std::clamp(first_deadline_ns() / 16, 20 * kNanosecondsPerMillisecond, kNanosecondsPerSecond);
}

std::uint64_t StallSettings::idle_period_ns() const {
  return std::clamp(first_deadline_ns() / 8, 20 * kNanosecondsPerMillisecond, 4 * kNanosecondsPerSecond);
}

StallDetector::Action StallDetector::check(const StallSettings& settings, std::uint64_t now,
                                           const ConnectionStatus& status, bool send_refused, bool tested) {
  // A long time without checks means that this process was stopped, its application too: that time is no stall.
  const std::uint64_t longest_gap = std::max(4 * settings.idle_period_ns(), kNanosecondsPerSecond);
  if (checked_ns_ != 0 && now - checked_ns_ > longest_gap) {
    last_progress_ns_ += now - checked_ns_;
    query_sent_ns_ = 0;
  }
  checked_ns_ = now;
  if (send_refused) send_refused_ns_ = now;
  if (tested) tested_ns_ = now;
  const std::uint64_t recent = recent_ns(settings);
  const ConnectionStatus before = local_status_;
  local_status_ = status;
  if (send_refused_ns_ != 0 && now - send_refused_ns_ <= recent) local_status_.flags |= ConnectionStatus::kSendRefused;
  if (tested_ns_ != 0 && now - tested_ns_ <= recent) local_status_.flags |= ConnectionStatus::kTested;
  const bool unconfirmed =
      (status.flags & ConnectionStatus::kOptionalReceives) != 0 && status.members != confirmed_members_;
  const bool outstanding = status.outstanding != 0 || status.flushes != 0 || unconfirmed ||
                           (status.sends != 0 && (local_status_.flags & ConnectionStatus::kSendRefused) != 0);
  const bool progressed = status.members != before.members || status.outstanding != before.outstanding ||
                          status.flushes != before.flushes || outstanding != has_outstanding_;
  has_outstanding_ = outstanding;
  if (progressed || !outstanding) {
    const bool was_reported = reported_;
    last_stall_ns_ = now - last_progress_ns_;
    last_progress_ns_ = now;
    query_sent_ns_ = 0;
    reported_ = false;
    return was_reported ? Action::kRecovered : Action::kNone;
  }
  local_status_.no_progress_ms = static_cast<std::uint32_t>((now - last_progress_ns_) / kNanosecondsPerMillisecond);
  const std::uint64_t stalled = now - last_progress_ns_;
  const bool fail_due = settings.fail_ns != 0 && stalled >= settings.fail_ns;
  const bool warn_due = settings.warn_ns != 0 && stalled >= settings.warn_ns && !reported_;
  if (!fail_due && !warn_due) return Action::kNone;
  if (query_sent_ns_ == 0) {
    query_sent_ns_ = now;
    ++query_id_;
    peer_.reset();
    return Action::kQuery;
  }
  if (!peer_ && now - query_sent_ns_ < kReplyTimeoutNs) return Action::kNone;
  query_sent_ns_ = 0;
  // Only the peer knows the state of optional receives. Without its reply they are no stall: the application does not
  // wait for them.
  if (!peer_ && status.outstanding == 0 && status.flushes == 0 &&
      (local_status_.flags & ConnectionStatus::kSendRefused) == 0)
    return Action::kNone;
  if (cause() == StallCause::kNone) {  // the peer has sent for all optional receives
    confirmed_members_ = status.members;
    return Action::kNone;
  }
  if (fail_due) return Action::kFail;
  reported_ = true;
  return Action::kReport;
}

bool StallDetector::accept_reply(const ConnectionStatus& peer) {
  if (query_sent_ns_ == 0 || peer.id != query_id_ || peer.sends == local_status_.sends) return false;
  peer_ = peer;
  return true;
}

}  // namespace verbatim
