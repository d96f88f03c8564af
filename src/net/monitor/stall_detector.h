// Finds connections that make no progress while something is outstanding, and the cause. The monitor checks each
// connection about once a second and remembers the time of its last progress: the data path needs no clock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/clock.h"
#include "net/diagnose/diagnosis.h"
#include "wire/notice.h"

namespace verbatim {

enum class StallCause : std::uint8_t {
  kNone,                   // nothing is outstanding
  kPeerPostsNoReceive,     // the peer's application has not posted its receive
  kPeerSendsNothing,       // the peer's application has not sent
  kMismatchedCalls,        // the peer's receive has another tag, or a message of its group is missing
  kOwnApplication,         // it does not test its requests
  kNetwork,                // data was posted and is not acknowledged
  kCtsNotReceived,         // a CTS entry was written and has not arrived at the sender
  kCompletionNotReceived,  // data was acknowledged and its completion has not arrived at the receiver
  kFlushNotCompleted,      // a flush of this end
  kPeerDoesNotReply,       // without the peer's status there is no other cause to be found
};

// From the statuses of both ends; `peer` is empty when it has not replied. kSendRefused and kTested are recent.
StallCause find_stall_cause(const wire::ConnectionStatus& local, const std::optional<wire::ConnectionStatus>& peer);

// Whether the cause is on this host.
bool is_local(StallCause cause);

// The cause, "the peer NAME is late: its application has not posted the receive", and what the operator is to do, "look
// at NAME first: ...". `device` is a device of this end. `channel_lost`: the peer cannot be asked, because the side
// channel is lost.
Diagnosis diagnose_stall(StallCause cause, const std::string& peer, const std::string& device,
                         bool channel_lost = false);

const char* qp_state_name(std::uint8_t state);
// "7 receives posted (4096 bytes received), 1 not arrived and tested, ..., QPs in RTS, no progress for 31.0 s".
std::string describe_status(const wire::ConnectionStatus& status);

struct StallSettings {
  std::uint64_t warn_ns = 0;  // 0: never
  std::uint64_t fail_ns = 0;

  // The smaller of the two; a usual time when both are 0: the peers may still query this end's status.
  std::uint64_t first_deadline_ns() const;
  // Between two checks, while something is outstanding and while nothing is.
  std::uint64_t busy_period_ns() const;
  std::uint64_t idle_period_ns() const;
};

// One connection. Owned by its MonitoredConnection; called by the monitoring thread. It has no clock, sockets or locks:
// the caller passes the time.
class StallDetector {
 public:
  static constexpr std::uint64_t kReplyTimeoutNs = 2 * kNanosecondsPerSecond;

  enum class Action : std::uint8_t { kNone, kQuery, kReport, kFail, kRecovered, kSuspectCts };

  // `status` as the comm has it now, `send_refused` and `tested` since the last check. kQuery: the caller sends
  // query_id() to the peer and gives its reply to accept_reply(). kReport and kFail: cause() is known. kSuspectCts: so
  // it is, kCtsNotReceived, and there was no progress for `suspect_ns` (0: never asked for).
  Action check(const StallSettings& settings, std::uint64_t now, const wire::ConnectionStatus& status,
               bool send_refused, bool tested, std::uint64_t suspect_ns = 0);

  std::uint32_t query_id() const { return query_id_; }
  // False: the reply is not to the open query.
  bool accept_reply(const wire::ConnectionStatus& peer);

  // Whether something was outstanding at the last check.
  bool has_outstanding() const { return has_outstanding_; }
  std::uint64_t stalled_ns(std::uint64_t now) const { return now - last_progress_ns_; }
  // How long there was no progress before kRecovered.
  std::uint64_t last_stall_ns() const { return last_stall_ns_; }
  StallCause cause() const { return find_stall_cause(local_status_, peer_); }
  bool reported() const { return reported_; }
  const wire::ConnectionStatus& local_status() const { return local_status_; }
  const std::optional<wire::ConnectionStatus>& peer() const { return peer_; }  // reply to the last query

 private:
  wire::ConnectionStatus local_status_;
  std::optional<wire::ConnectionStatus> peer_;
  std::uint64_t checked_ns_ = 0;
  std::uint64_t last_progress_ns_ = 0;  // or when nothing was outstanding
  std::uint64_t last_stall_ns_ = 0;
  std::uint64_t send_refused_ns_ = 0;  // the last check before which an isend was refused
  std::uint64_t tested_ns_ = 0;        // the last check before which a request was tested and not done
  std::uint64_t query_sent_ns_ = 0;    // 0: no query is open
  std::uint64_t suspicion_ns_ = 0;     // when `suspect_ns` was last over
  std::uint32_t query_id_ = 0;
  std::uint32_t confirmed_members_ = 0;  // receives for which the sender is known to have sent
  bool has_outstanding_ = false;
  bool reported_ = false;
};

}  // namespace verbatim
