#include "net/monitor/stall_detector.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace verbatim {
namespace {

using wire::ConnectionStatus;

bool has(const ConnectionStatus& status, ConnectionStatus::Flag flag) {
  return (status.flags & flag) != 0;
}

StallCause find_sender_cause(const ConnectionStatus& local, const std::optional<ConnectionStatus>& peer) {
  if (local.outstanding != 0) {
    return has(local, ConnectionStatus::kTested) ? StallCause::kNetwork : StallCause::kOwnApplication;
  }
  if (!has(local, ConnectionStatus::kSendRefused)) return StallCause::kNone;
  if (has(local, ConnectionStatus::kCtsReady)) return StallCause::kMismatchedCalls;
  if (!peer) return StallCause::kPeerDoesNotReply;
  const bool receive_posted = static_cast<std::int32_t>(peer->members - local.members) > 0;
  return receive_posted ? StallCause::kCtsNotReceived : StallCause::kPeerPostsNoReceive;
}

StallCause find_receiver_cause(const ConnectionStatus& local, const std::optional<ConnectionStatus>& peer) {
  const bool tested = has(local, ConnectionStatus::kTested);
  if (local.flushes != 0) return tested ? StallCause::kFlushNotCompleted : StallCause::kOwnApplication;
  if (!peer) return StallCause::kPeerDoesNotReply;
  const bool unsent = static_cast<std::int32_t>(local.members - peer->members) > 0;
  // A sender that does not test does not notice that its data has been acknowledged.
  if (peer->outstanding != 0 && (!unsent || has(*peer, ConnectionStatus::kTested))) return StallCause::kNetwork;
  if (unsent) {
    if (!has(*peer, ConnectionStatus::kSendRefused)) return StallCause::kPeerSendsNothing;
    return has(*peer, ConnectionStatus::kCtsReady) ? StallCause::kMismatchedCalls : StallCause::kCtsNotReceived;
  }
  if (local.outstanding == 0) return StallCause::kNone;
  return tested ? StallCause::kCompletionNotReceived : StallCause::kOwnApplication;
}

}  // namespace

StallCause find_stall_cause(const ConnectionStatus& local, const std::optional<ConnectionStatus>& peer) {
  return local.sends != 0 ? find_sender_cause(local, peer) : find_receiver_cause(local, peer);
}

bool is_local(StallCause cause) {
  return cause == StallCause::kOwnApplication || cause == StallCause::kCompletionNotReceived ||
         cause == StallCause::kFlushNotCompleted;
}

Diagnosis diagnose_stall(StallCause cause, const std::string& peer, const std::string& device, bool channel_lost) {
  const std::string stack = " first: 'gdb -p' or 'py-spy dump -p' shows what its application does";
  const std::string itself = ", and verbatim-top whether it waits for another process itself";
  const std::string kernel_log = "'dmesg | grep " + device + "'";
  const std::string network = "'rdma statistic show' and " + kernel_log + " on this host, the same at " + peer;
  switch (cause) {
    case StallCause::kNone:
      break;
    case StallCause::kPeerPostsNoReceive:
      return {"the peer " + peer + " is late: its application has not posted the receive",
              "look at " + peer + stack + itself};
    case StallCause::kPeerSendsNothing:
      return {"the peer " + peer + " is late: its application has not sent", "look at " + peer + stack + itself};
    case StallCause::kMismatchedCalls:
      return {"the calls of the applications differ: this end and the peer " + peer +
                  " use different tags, or a message of a group is missing",
              "compare the calls of this process and of " + peer + ": order, tags, groups"};
    case StallCause::kOwnApplication:
      return {"this process is late: its application does not test its requests for the peer " + peer,
              "look at this process" + stack};
    case StallCause::kNetwork:
      return {"the network, or the device: data between this end and the peer " + peer +
                  " was posted and is not acknowledged",
              network};
    case StallCause::kCtsNotReceived:
      return {"the network, or the device: the CTS entry of a receive between this end and the peer " + peer +
                  " was written and has not arrived",
              network};
    case StallCause::kCompletionNotReceived:
      return {"the device: all data of the peer " + peer + " was acknowledged, and the completion has not arrived",
              kernel_log};
    case StallCause::kFlushNotCompleted:
      return {"this host's device: a flush of GPU memory does not complete (data of the peer " + peer + ")",
              kernel_log};
    case StallCause::kPeerDoesNotReply:
      if (channel_lost) {
        return {"the state of the peer " + peer + " is not known: the side channel is lost, and is made again",
                "look at the network of the side channels between the hosts (VERBATIM_SOCKET_IFNAME): firewalls, "
                "switches; then at " +
                    peer + stack};
      }
      return {
          "the peer " + peer + " does not answer: its process is stopped or hangs, its host is down, or it is cut off",
          "look at " + peer + " first: 'ping' and 'ps' show whether it can be reached and runs"};
  }
  return {"nothing is outstanding", "nothing"};
}

const char* qp_state_name(std::uint8_t state) {
  constexpr const char* kNames[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return state < std::size(kNames) ? kNames[state] : "unknown";
}

std::string describe_status(const ConnectionStatus& status) {
  const char* tested = has(status, ConnectionStatus::kTested) ? " and tested" : " and not tested";
  if (status.outstanding == 0) tested = "";
  const std::string bytes = std::to_string(status.bytes);
  const std::string outstanding = std::to_string(status.outstanding);
  std::string text = std::to_string(status.members);
  if (status.sends != 0) {
    const char* const refused =
        has(status, ConnectionStatus::kCtsReady) ? "called, no CTS entry with its tag" : "called, no CTS entry";
    text += " messages (" + bytes + " bytes) sent, " + outstanding + " work requests not completed" + tested +
            ", isend " + (has(status, ConnectionStatus::kSendRefused) ? refused : "not called");
  } else {
    text += " receives posted (" + bytes + " bytes received), " + outstanding + " not arrived" + tested + ", " +
            std::to_string(status.flushes) + " flushes";
  }
  text.append(", QPs in ").append(qp_state_name(status.qp_state));
  if (status.no_progress_ms == 0) return text;
  return text + ", no progress for " + to_seconds(status.no_progress_ms * kNanosecondsPerMillisecond);
}

std::uint64_t StallSettings::first_deadline_ns() const {
  if (warn_ns == 0 && fail_ns == 0) return 30 * kNanosecondsPerSecond;
  return warn_ns == 0 || fail_ns == 0 ? std::max(warn_ns, fail_ns) : std::min(warn_ns, fail_ns);
}

std::uint64_t StallSettings::busy_period_ns() const {
  return std::clamp(first_deadline_ns() / 16, 20 * kNanosecondsPerMillisecond, kNanosecondsPerSecond);
}

std::uint64_t StallSettings::idle_period_ns() const {
  return std::clamp(first_deadline_ns() / 8, 20 * kNanosecondsPerMillisecond, 4 * kNanosecondsPerSecond);
}

StallDetector::Action StallDetector::check(const StallSettings& settings, std::uint64_t now,
                                           const ConnectionStatus& status, bool send_refused, bool tested,
                                           std::uint64_t suspect_ns) {
  // A long time without checks means that this process was stopped, its application too: that time is no stall.
  const std::uint64_t longest_gap = std::max(4 * settings.idle_period_ns(), kNanosecondsPerSecond);
  if (checked_ns_ != 0 && now - checked_ns_ > longest_gap) {
    last_progress_ns_ += now - checked_ns_;
    query_sent_ns_ = 0;
  }
  checked_ns_ = now;
  if (send_refused) send_refused_ns_ = now;
  if (tested) tested_ns_ = now;
  // What the application has not done for longer than this counts as not done.
  const std::uint64_t recent = 2 * settings.idle_period_ns();
  const ConnectionStatus before = std::exchange(local_status_, status);
  if (send_refused_ns_ != 0 && now - send_refused_ns_ <= recent) local_status_.flags |= ConnectionStatus::kSendRefused;
  if (tested_ns_ != 0 && now - tested_ns_ <= recent) local_status_.flags |= ConnectionStatus::kTested;
  const bool waits = status.outstanding != 0 || status.flushes != 0 ||
                     (status.sends != 0 && has(local_status_, ConnectionStatus::kSendRefused));
  const bool outstanding =
      waits || (has(status, ConnectionStatus::kOptionalReceives) && status.members != confirmed_members_);
  const bool progressed = status.members != before.members || status.outstanding != before.outstanding ||
                          status.flushes != before.flushes || outstanding != has_outstanding_;
  has_outstanding_ = outstanding;
  const std::uint64_t stalled = stalled_ns(now);
  if (progressed || !outstanding) {
    last_stall_ns_ = stalled;
    last_progress_ns_ = now;
    query_sent_ns_ = 0;
    return std::exchange(reported_, false) ? Action::kRecovered : Action::kNone;
  }
  const bool fail_due = settings.fail_ns != 0 && stalled >= settings.fail_ns;
  const bool warn_due = settings.warn_ns != 0 && stalled >= settings.warn_ns && !reported_;
  const bool suspicion_due = suspect_ns != 0 && now - std::max(suspicion_ns_, last_progress_ns_) >= suspect_ns;
  if (!fail_due && !warn_due && !suspicion_due) return Action::kNone;
  if (query_sent_ns_ == 0) {
    query_sent_ns_ = now;
    ++query_id_;
    peer_.reset();
    return Action::kQuery;
  }
  if (!peer_ && now - query_sent_ns_ < kReplyTimeoutNs) return Action::kNone;
  query_sent_ns_ = 0;
  if (suspicion_due) suspicion_ns_ = now;
  // Only the peer knows the state of optional receives. Without its reply they are no stall: the application does not
  // wait for them.
  if (!peer_ && !waits) return Action::kNone;
  if (cause() == StallCause::kNone) {  // the peer has sent for all optional receives
    confirmed_members_ = status.members;
    return Action::kNone;
  }
  if (fail_due) return Action::kFail;
  if (warn_due) {
    reported_ = true;
    return Action::kReport;
  }
  return cause() == StallCause::kCtsNotReceived ? Action::kSuspectCts : Action::kNone;
}

bool StallDetector::accept_reply(const ConnectionStatus& peer) {
  if (query_sent_ns_ == 0 || peer.id != query_id_ || peer.sends == local_status_.sends) return false;
  peer_ = peer;
  return true;
}

}  // namespace verbatim
