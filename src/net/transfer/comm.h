// What a send comm and a receive comm share: their end of the connection, the side channel, and the first error.
//
// Threads: isend, irecv, iflush and test of one comm come from one thread at a time (NCCL's progress thread); while
// they run, another thread may register memory, which touches only `ports`, the devices' own locked caches and, on a
// receive comm, the locked making of its flush QPs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/diagnose/failure.h"
#include "net/transfer/comm_observer.h"
#include "net/transfer/comm_settings.h"
#include "net/transfer/connection_stats.h"
#include "net/transfer/endpoint.h"
#include "net/transfer/memory.h"
#include "net/transfer/request.h"
#include "net/transfer/single_writer.h"
#include "wire/notice.h"

namespace verbatim {

// What the control thread tells a comm: bits of its attention word.
enum class CommSignal : std::uint32_t {
  kPeerClosed = 0x1,        // in peace
  kPeerDisconnected = 0x2,  // without a word
  kDeviceFailed = 0x4,      // ours
  kPeerFailed = 0x8,        // with the verdict passed before
  kPeerAborted = 0x10,      // its owner closed it with work outstanding
  kFailedByMonitor = 0x20,  // by our control thread, with the verdict passed before
};

enum class CommKind : std::uint8_t { kSend, kRecv };

class Comm {
 public:
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  CommKind kind() const { return kind_; }
  const CommSettings& settings() const { return settings_; }
  Endpoint& endpoint() { return endpoint_; }
  const Endpoint& endpoint() const { return endpoint_; }

  // Moves the QPs to RTS towards `remote` and remembers what the data path needs of it.
  virtual Status connect(const wire::Hello& remote, int traffic_class) = 0;

  // What the peer is told about this end; the secret and identity are the caller's to add.
  wire::Hello hello() const;

  // What to add to an error of connect().
  std::string explain_setup_error(const Error& error) const;

  // Both ends of a QP's connection, for messages.
  std::string describe_path(std::size_t qp) const;

  void set_side_channel(UniqueFd socket) { side_channel_ = std::move(socket); }
  const UniqueFd& side_channel() const { return side_channel_; }

  // Any thread: the data path sees it at its next progress.
  void set_signal(CommSignal signal) {
    slow_path_flags_.fetch_or(static_cast<std::uint32_t>(signal), std::memory_order_release);
  }

  // The control thread alone, once, before the signal that is about it: why the connection ends.
  void set_failure_reason(ErrorKind kind, std::string_view why);

  // Set before the data path runs: the observer reports a failure to the peer.
  void set_observer(CommObserver* observer) { observer_ = observer; }
  // How this end failed, nullptr while it has not. Any thread.
  const std::string* failure_text() const {
    return failure_published_.load(std::memory_order_acquire) ? &failure_text_ : nullptr;
  }
  // The same for what ended the device, or a queue of ours.
  void set_signal(ibv_event_type event) {
    device_event_.store(event, std::memory_order_relaxed);
    set_signal(CommSignal::kDeviceFailed);
  }

  bool uses(const Device& device, std::uint8_t port_num = 0) const;  // 0: any port
  bool uses(const ibv_qp& qp) const;
  bool uses(const ibv_cq& cq) const;
  // Asks the device whether all QPs are sound: they are in no error state.
  bool qps_usable() const;

  // Whether every request has finished: then the QPs may outlive the call that closes the comm. Optional receives have,
  // though their data may still be on its way; it is the caller who has seen it, or does not care.
  virtual bool all_done() const = 0;
  // Whether what is outstanding waits for the peer to do more than acknowledge.
  virtual bool waits_for_peer() const = 0;
  // What the connection has carried; not while the data path runs.
  virtual TransferCounts transfer_counts() const = 0;
  // Of that, what is known to be over.
  virtual CompletedCounts completed_counts() const = 0;
  ConnectionStats stats() const;

  // The control thread looks on: this end as it is now, but for what only time tells; qp_state, which asks the device.
  virtual wire::ConnectionStatus status() const = 0;
  // What the application has done since the last call.
  struct Activity {
    bool send_refused = false;  // called isend and was refused
    bool tested = false;        // tested in vain
  };
  virtual Activity take_activity() = 0;
  // That of a QP in error, else of the first that is not in RTS.
  ibv_qp_state qp_state() const;

  // Stops all work at once: the buffers are the caller's again.
  void abort();

  // Any thread.
  virtual Result<std::unique_ptr<MemoryHandle>> register_memory(const MrRequest& request);

  // What a call of the data path must look at besides its own work: 0 in the usual case.
  enum SlowPathFlag : std::uint32_t {
    kSignals = 0xff,       // CommSignal
    kFailed = 0x100,       // failure() is not kNone
    kPostPending = 0x200,  // a message waits for room in a send queue
    kSeveralCqs = 0x400,   // there are more completion queues than the first: always
  };
  std::uint32_t slow_path_flags() const { return slow_path_flags_.load(std::memory_order_relaxed); }

  // Why the connection uses immediates although VERBATIM_COMPLETION=atomic is set; nullptr otherwise. After connect.
  const char* atomics_refused() const { return atomics_refused_; }

  // The first error; every call answers with it from then on.
  const Error* error() const { return failure_ != ErrorKind::kNone ? &error_ : nullptr; }

 protected:
  Comm(CommKind kind, const CommSettings& settings, Endpoint endpoint, ControlMemory control);

  // Any thread. Of a receive comm, which has QPs of its own for flushes.
  virtual bool uses_for_flush(const ibv_qp&) const { return false; }

  // The part of the control memory that the peer writes: the CTS ring or the completion record.
  virtual const void* peer_written_memory() const = 0;
  // wire::Capability bits of our hello.
  virtual std::uint32_t capabilities() const = 0;

  void set_slow_path_flag(SlowPathFlag bit) { slow_path_flags_.fetch_or(bit, std::memory_order_relaxed); }
  void clear_slow_path_flag(SlowPathFlag bit) { slow_path_flags_.fetch_and(~bit, std::memory_order_relaxed); }

  ErrorKind failure() const { return failure_; }

  // Logs and keeps the first error of the comm; the ones that follow from it are silent. `describe` answers what
  // happened.
  template <typename Describe>
  void fail(ErrorKind kind, const char* operation, Describe describe) noexcept {
    if (!record_failure(kind, operation)) return;
    try {
      log_failure(describe());
    } catch (...) {
      log_failure_without_memory();
    }
  }
  // The same with what `diagnose` makes of it and the facts of a QP's connection.
  template <typename Describe>
  void fail(ErrorKind kind, const char* operation, std::size_t qp, Diagnosis (*diagnose)(const PathFacts&),
            Describe describe) noexcept {
    fail(kind, operation, [&] {
      const PathFacts path = facts(qp);
      return describe_failure(describe(), diagnose(path), path);
    });
  }
  // The same for a completion that reports a failure. It is logged when everything that came with it has been taken
  // in: what was flushed is a number in that line, and a cause takes the place of what only follows from it.
  void fail_completion(const ibv_wc& completion, std::size_t qp, const FailedWork& work) noexcept;
  void fail_post(const char* operation, int returned, std::size_t qp) noexcept;

  // Completions taken from a queue at a time.
  static constexpr int kPollBatch = 8;

  // Fills completions_ from the first completion queue: how many, negative when polling failed.
  int poll_first_cq() { return ibv_poll_cq(first_cq_, kPollBatch, completions_); }
  // What a poll of the first queue left to do, when it found `taken` or attention() asks for it: the other queues,
  // failures, signals.
  template <typename Complete>
  void poll_other_cqs(int polled, Complete complete) {
    bool all = polled < kPollBatch;
    bool poll_failed = polled < 0;
    for (const UniqueCq& cq : endpoint_.cqs().subspan(1)) {
      const int count = ibv_poll_cq(cq.get(), kPollBatch, completions_);
      for (int i = 0; i < count; ++i) complete(completions_[i]);
      all = all && count < kPollBatch;
      poll_failed = poll_failed || count < 0;
    }
    if (poll_failed) fail_poll();
    if (completion_failure_pending_) {
      for (const UniqueCq& cq : endpoint_.cqs()) {
        int count = 0;
        // No more than it can hold: a peer that goes on and on must not keep us here.
        for (int left = cq.get()->cqe; left > 0 && (count = ibv_poll_cq(cq.get(), kPollBatch, completions_)) > 0;
             left -= count) {
          for (int i = 0; i < count; ++i) complete(completions_[i]);
        }
      }
      log_completion_failure();
    }
    if (all) check_signals(false);
  }
  // Only when everything that has arrived was taken in: the completion queues were found empty. `starved`: the caller
  // waits for something of the peer.
  void check_signals(bool waits_for_message) {
    if ((slow_path_flags() & kSignals) != 0) process_signals(waits_for_message);
  }
  // Whether the peer, or the device, is known to take nothing any more.
  bool is_peer_or_device_dead() const {
    return (slow_path_flags() & kSignals & ~static_cast<std::uint32_t>(CommSignal::kPeerClosed)) != 0;
  }

  SingleWriter<bool> tested_;  // something was tested in vain

  // A member, not a local array: calls that find nothing then save no registers.
  ibv_wc completions_[kPollBatch];
  const CommSettings& settings_;
  const char* atomics_refused_ = nullptr;
  ControlMemory control_;  // outlives the QPs through which the peer writes it
  Endpoint endpoint_;

 private:
  void process_signals(bool waits_for_message) noexcept;
  // Whether this is the first failure.
  bool record_failure(ErrorKind kind, const char* operation) noexcept;
  // Logs it and has the peer told.
  void log_failure(std::string what) noexcept;
  void log_failure_without_memory() noexcept;
  void log_completion_failure() noexcept;
  const char* failure_reason() const {
    return failure_reason_ != nullptr ? failure_reason_.get() : "no memory to say why";
  }
  PathFacts facts(std::size_t qp) const;
  std::string describe_event() const;
  bool wait_for_device_event() const;
  void fail_poll() noexcept;
  void publish_failure() noexcept;

  ibv_cq* const first_cq_;
  std::atomic<std::uint32_t> slow_path_flags_{0};
  ErrorKind failure_ = ErrorKind::kNone;
  const CommKind kind_;
  std::uint64_t peer_end_detected_ns_ = 0;
  Error error_;
  std::string failure_text_;
  std::atomic<bool> failure_published_{false};  // the text stands
  CommObserver* observer_ = nullptr;
  ErrorKind failure_reason_kind_ = ErrorKind::kRemote;
  std::unique_ptr<char[]> failure_reason_;  // a peer's text, and who said it: few connections ever need the room
  // The completion that failed, until it is reported.
  struct {
    ibv_wc completion;
    std::size_t qp;
    FailedWork work;
  } failed_completion_ = {};
  bool completion_failure_pending_ = false;
  std::uint64_t flushed_count_ = 0;                               // work requests that ended with it
  std::atomic<ibv_event_type> device_event_{IBV_EVENT_COMM_EST};  // what kDeviceFailed stands for
  UniqueFd side_channel_;
};

// The registrable ends of connections, from NCCL's void*.
inline Comm* as_comm(void* comm) {
  return static_cast<Comm*>(comm);
}

}  // namespace verbatim
