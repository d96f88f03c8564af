// Whether and why a comm has failed, and what the monitor has reported to it.
//
//   kWorking --record--> kRecorded --publish--> kPublished
//      |                                           ^
//      +--record_completion--> kCompletionHeld ----+ publish
//
//   kWorking         no error; the monitor may have set comm events, which the data path reads at its next progress
//   kRecorded        the comm has failed: error() is final; the log line is being written
//   kCompletionHeld  the comm has failed with a completion. Completions polled after it are still examined: a flushed
//                    work request may come before the one that is the cause, and the others are counted
//   kPublished       the failure is logged; text() is set for the monitor, which sends it to the peer
//
// Owned by a comm. The thread of the data path records and publishes; any thread sets comm events and reads text().
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "net/diagnose/diagnosis.h"
#include "net/diagnose/failure.h"

namespace verbatim {

// What the monitor reports to a comm: bits of its flags.
enum class CommEvent : std::uint32_t {
  kPeerClosed = 0x1,        // the peer closed the connection gracefully
  kPeerDisconnected = 0x2,  // the side channel ended without a close message
  kDeviceFailed = 0x4,      // an event of the local device, or of a QP or CQ of this comm; device_event() is set
  kPeerFailed = 0x8,        // the peer has sent a failure notice; set_reason() was called before
  kPeerAborted = 0x10,      // the peer's application closed the comm with outstanding operations
  kFailedByMonitor = 0x20,  // the monitor ends the connection; set_reason() was called before
  kProbePeer = 0x40,  // nothing is read from the peer, and only its NIC can say whether it lives: Comm::post_probes
};

// What the monitor knows of the side channel of a comm that has not failed.
enum class ChannelState : std::uint8_t {
  kOpen,
  kNoAnswer,  // the peer's host acknowledges nothing
  kLost,      // it has ended with an error, and is made again
};

class FailureState {
 public:
  // The slow path flags. A call of the data path that finds one of them set takes the slow path.
  enum Flag : std::uint32_t {
    kCommEvents = 0xff,     // CommEvent
    kFailed = 0x100,        // error() is set
    kPostPending = 0x200,   // a group waits for free entries of a send queue
    kSeveralCqs = 0x400,    // the comm has more than one completion queue: set for its whole life
    kProbing = 0x800,       // the answer of the peer's NIC is awaited
    kLanes = 0x1000,        // a lane has failed, and its messages are not all posted again (failover.h)
    kMonitorActs = 0x2000,  // the monitor advances the comm: RecvComm::advance_for_idle
  };
  std::uint32_t flags() const { return flags_.load(std::memory_order_relaxed); }
  // What the monitor has changed before it cleared kMonitorActs is read after it.
  std::uint32_t acquire_flags() const { return flags_.load(std::memory_order_acquire); }
  void set_flag(Flag flag) { flags_.fetch_or(flag, std::memory_order_relaxed); }
  void clear_flag(Flag flag) { flags_.fetch_and(~flag, std::memory_order_release); }

  // kNone until the comm has failed.
  ErrorKind kind() const { return error_.kind; }
  const Error* error() const { return kind() != ErrorKind::kNone ? &error_ : nullptr; }

  // Any thread.
  void set_event(CommEvent event) { flags_.fetch_or(static_cast<std::uint32_t>(event), std::memory_order_release); }
  void clear_event(CommEvent event) { flags_.fetch_and(~static_cast<std::uint32_t>(event), std::memory_order_relaxed); }
  // `qp`: the first one on the port that the event concerns.
  void set_device_event(ibv_event_type event, std::size_t qp) {
    device_event_.store(event, std::memory_order_relaxed);
    event_qp_.store(static_cast<std::uint8_t>(qp), std::memory_order_relaxed);
    set_event(CommEvent::kDeviceFailed);
  }
  // Takes back the event of a QP; false: there is none. That of a device stays, also when it is set meanwhile.
  bool clear_qp_event() {
    if (!has(CommEvent::kDeviceFailed) || !is_qp_event(device_event())) return false;
    flags_.fetch_and(~static_cast<std::uint32_t>(CommEvent::kDeviceFailed), std::memory_order_acq_rel);
    if (!is_qp_event(device_event())) set_event(CommEvent::kDeviceFailed);
    return true;
  }
  // The event of the last kDeviceFailed.
  ibv_event_type device_event() const { return device_event_.load(std::memory_order_relaxed); }
  std::size_t event_qp() const { return event_qp_.load(std::memory_order_relaxed); }
  // Only the monitor calls it. `detail`: for how long the peer has sent nothing, in ms, or the errno with which the
  // channel was lost.
  void set_channel(ChannelState state, std::uint32_t detail) {
    channel_.store(std::uint64_t{static_cast<std::uint8_t>(state)} << 32 | detail, std::memory_order_relaxed);
  }
  // Any thread.
  ChannelState channel_state() const {
    return static_cast<ChannelState>(channel_.load(std::memory_order_relaxed) >> 32);
  }
  std::uint32_t channel_detail() const { return static_cast<std::uint32_t>(channel_.load(std::memory_order_relaxed)); }
  // Whether the monitor has set one of these.
  template <typename... Events>
  bool has(Events... events) const {
    return (flags_.load(std::memory_order_acquire) & (static_cast<std::uint32_t>(events) | ...)) != 0;
  }

  // Why the connection ends. Only the monitor calls it, at most once, and sets kPeerFailed or kFailedByMonitor after
  // it. If there is no memory for the text, reason() says so.
  void set_reason(ErrorKind kind, std::string_view why);
  ErrorKind reason_kind() const { return reason_kind_; }
  const char* reason() const { return reason_ != nullptr ? reason_.get() : "no memory to say why"; }

  // Returns false, and changes nothing, when the comm had failed before: the first error is kept.
  bool record(ErrorKind kind, const char* operation) noexcept;

  struct HeldCompletion {
    ibv_wc completion;
    std::size_t qp;
    FailedWork work;
    std::uint64_t flushed;  // number of other failed completions with IBV_WC_WR_FLUSH_ERR
  };
  // Records a failed completion. While one is held, a flushed completion is replaced by the first completion with
  // another error, and further flushed completions are counted.
  void record_completion(ErrorKind kind, const ibv_wc& completion, std::size_t qp, const FailedWork& work) noexcept;
  bool completion_held() const { return phase_.load(std::memory_order_relaxed) == Phase::kCompletionHeld; }
  const HeldCompletion& held_completion() const { return held_; }

  // Called when the failure has been logged. `failure` is nullptr and `text` empty if there was no memory for them.
  void publish(std::unique_ptr<Failure> failure, std::string text) noexcept;
  // Any thread.
  bool has_failed() const { return (flags() & kFailed) != 0; }
  // Any thread: the text for the peer. nullptr until the failure is published; empty if there was no memory for it.
  const std::string* text() const { return published() ? &text_ : nullptr; }
  // Any thread: the published failure. nullptr until it is published, or if there was no memory for it.
  const Failure* failure() const { return published() ? failure_.get() : nullptr; }

 private:
  enum class Phase : std::uint8_t { kWorking, kRecorded, kCompletionHeld, kPublished };

  bool published() const { return phase_.load(std::memory_order_acquire) == Phase::kPublished; }

  std::atomic<std::uint32_t> flags_{0};
  Error error_ = {.kind = ErrorKind::kNone};
  std::atomic<Phase> phase_{Phase::kWorking};
  std::atomic<std::uint8_t> event_qp_{0};
  std::atomic<ibv_event_type> device_event_{IBV_EVENT_COMM_EST};
  std::atomic<std::uint64_t> channel_{0};
  ErrorKind reason_kind_ = ErrorKind::kRemote;
  std::unique_ptr<char[]> reason_;  // allocated only when needed: few connections ever have one
  HeldCompletion held_ = {};
  std::unique_ptr<Failure> failure_;
  std::string text_;
};

}  // namespace verbatim
