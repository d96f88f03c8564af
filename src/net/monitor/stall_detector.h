// Finds connections that have stopped while something is outstanding, and who is to blame. The control thread looks at
// each every second or so and notes when it last saw it move: the data path needs no clock. Pure of clocks and sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/clock.h"
#include "wire/notice.h"

namespace verbatim {

enum class StallCause : std::uint8_t {
  kNone,                   // nothing is outstanding after all
  kPeerPostsNoReceive,     // the peer's application has not posted its receive
  kPeerSendsNothing,       // the peer's application has not sent
  kMismatchedCalls,        // the peer's receive has another tag, or a message of its group is missing
  kOwnApplication,         // it does not ask for what may have come
  kNetwork,                // data was posted and is not acknowledged
  kCtsNotReceived,         // a receive was announced, and the sender has not heard of it
  kCompletionNotReceived,  // data was acknowledged, and the receiver has not heard of it
  kFlushNotCompleted,      // ours: a flush does not end
  kPeerDoesNotReply,       // whatever it is, the peer answers no question
};

// `mine` and the peer's answer, if there was one. kPolls and kWaits as of late.
StallCause find_stall_cause(const wire::ConnectionStatus& local_status,
                            const std::optional<wire::ConnectionStatus>& peer);

// Whether the remedy is on this host.
bool is_local(StallCause cause);

// "the peer NAME is late: its application has not posted the receive", for a blame that is somebody's.
void describe_stall_cause(StallCause cause, const char* peer, std::span<char> text);

// What its operator is to look at then: "look at NAME first: ...". `device` is a device of this end.
void describe_next_step(StallCause cause, const char* peer, const char* device, std::span<char> text);

void describe_qp_state(std::uint8_t state, std::span<char> text);
// "7 receives posted (4096 bytes came), 1 not arrived and tested for, ..., QPs in RTS, still for 31.0 s".
void describe_status(const wire::ConnectionStatus& status, std::span<char> text);

struct StallSettings {
  std::uint64_t warn_ns = 0;  // 0: never
  std::uint64_t fail_ns = 0;

  // What comes first; the usual time where nothing is wanted: the peers may still ask how it looks to us.
  std::uint64_t first_deadline_ns() const;
  // Between two looks, at what waits and at what rests.
  std::uint64_t busy_period_ns() const;
  std::uint64_t idle_period_ns() const;
};

// One connection under watch.
class StallDetector {
 public:
  static constexpr std::uint64_t kReplyTimeoutNs = 2 * kNanosecondsPerSecond;

  enum class Action : std::uint8_t { kNone, kAsk, kReport, kFail, kRecovered };

  // `view` as the comm has it now, `waits` and `polls` since the last look. kAsk: the peer is to be asked question(),
  // and whatever it answers be given to hear(). kReport and kFail: blame() says why.
  Action check(const StallSettings& settings, std::uint64_t now, const wire::ConnectionStatus& status,
               bool send_refused, bool tested);

  std::uint32_t query_id() const { return query_id_; }
  // False: an answer to no question.
  bool accept_reply(const wire::ConnectionStatus& peer);

  // Whether something is outstanding, as of the last look.
  bool has_outstanding() const { return has_outstanding_; }
  std::uint64_t stalled_ns(std::uint64_t now) const { return now - last_progress_ns_; }
  // How long it had stood still before kMovesAgain.
  std::uint64_t last_stall_ns() const { return last_stall_ns_; }
  StallCause cause() const { return find_stall_cause(local_status_, peer_); }
  bool reported() const { return reported_; }
  const wire::ConnectionStatus& local_status() const { return local_status_; }
  const std::optional<wire::ConnectionStatus>& peer() const { return peer_; }  // of the last question

 private:
  wire::ConnectionStatus local_status_;
  std::optional<wire::ConnectionStatus> peer_;
  std::uint64_t checked_ns_ = 0;
  std::uint64_t last_progress_ns_ = 0;  // of what is outstanding: since it moved last
  std::uint64_t last_stall_ns_ = 0;
  std::uint64_t send_refused_ns_ = 0;  // when the application was last seen to be refused,
  std::uint64_t tested_ns_ = 0;        // and to test in vain
  std::uint64_t query_sent_ns_ = 0;    // 0: no question is open
  std::uint32_t query_id_ = 0;
  std::uint32_t confirmed_members_ = 0;  // receives that the sender is known to have served
  bool has_outstanding_ = false;
  bool reported_ = false;
};

}  // namespace verbatim
