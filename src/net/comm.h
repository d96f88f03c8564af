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

#include "base/fd.h"
#include "base/result.h"
#include "net/endpoint.h"
#include "net/failure.h"
#include "net/memory.h"
#include "net/request.h"
#include "net/stats.h"
#include "net/watched.h"
#include "wire/notice.h"

namespace verbatim {

class Context;
class ControlThread;

// What the control thread tells a comm: bits of its attention word.
enum class CommSignal : std::uint32_t {
  kPeerClosed = 0x1,    // in peace
  kPeerGone = 0x2,      // without a word
  kDeviceFailed = 0x4,  // ours
  kPeerFailed = 0x8,    // with the verdict passed before
  kPeerGaveUp = 0x10,   // its owner closed it with work outstanding
  kCondemned = 0x20,    // by our control thread, with the verdict passed before
};

enum class CommKind : std::uint8_t { kSend, kRecv };

class Comm {
 public:
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  CommKind kind() const { return kind_; }
  Context& context() const { return context_; }
  Endpoint& endpoint() { return endpoint_; }
  const Endpoint& endpoint() const { return endpoint_; }

  // Moves the QPs to RTS towards `remote` and remembers what the data path needs of it.
  virtual Status connect(const wire::Hello& remote, int traffic_class) = 0;

  // What the peer is told about this end; the secret and identity are the caller's to add.
  wire::Hello hello() const;

  // What to add to an error of connect().
  std::string explain_setup(const Error& error) const;

  // Both ends of a QP's connection, for messages.
  std::string describe_path(std::size_t qp) const;

  void keep_side_channel(UniqueFd socket) { side_channel_ = std::move(socket); }
  const UniqueFd& side_channel() const { return side_channel_; }

  // Any thread: the data path sees it at its next progress.
  void raise(CommSignal signal) { attention_.fetch_or(static_cast<std::uint32_t>(signal), std::memory_order_release); }

  // The control thread alone, once, before the signal that is about it: why the connection ends.
  void pass_verdict(ErrorKind kind, std::string_view why);

  // Who is told of a failure, so that the peer hears of it: set before the data path runs.
  void set_watcher(const ControlThread* watcher) { watcher_ = watcher; }
  // How this end failed, nullptr while it has not. Any thread.
  const std::string* failure_text() const {
    return failure_told_.load(std::memory_order_acquire) ? &failure_text_ : nullptr;
  }
  // The same for what ended the device, or a queue of ours.
  void raise(ibv_event_type event) {
    event_.store(event, std::memory_order_relaxed);
    raise(CommSignal::kDeviceFailed);
  }

  bool uses(const Device& device, std::uint8_t port_num = 0) const;  // 0: any port
  bool uses(const ibv_qp& qp) const;
  bool uses(const ibv_cq& cq) const;
  // Asks the device whether all QPs are sound: they are in no error state.
  bool qps_stand() const;

  // Whether every request has finished: then the QPs may outlive the call that closes the comm. Optional receives have,
  // though their data may still be on its way; it is the caller who has seen it, or does not care.
  virtual bool quiet() const = 0;
  // Whether what is outstanding waits for the peer to do more than acknowledge.
  virtual bool needs_peer() const = 0;
  // What the connection has carried; not while the data path runs.
  virtual Carried carried() const = 0;
  // Of that, what is known to be over.
  virtual Delivered delivered() const = 0;
  ConnectionStats stats() const;

  // The control thread looks on: this end as it is now, but for what only time tells; qp_state, which asks the device.
  virtual wire::View view() const = 0;
  // What the application has done since the last call.
  struct Marks {
    bool waits = false;  // called isend and was refused
    bool polls = false;  // tested in vain
  };
  virtual Marks take_marks() = 0;
  // That of a QP in error, else of the first that is not in RTS.
  ibv_qp_state qp_state() const;

  // Stops all work at once: the buffers are the caller's again.
  void abort();

  // Any thread.
  virtual Result<std::unique_ptr<MemoryHandle>> register_memory(const MrRequest& request);

  // What a call of the data path must look at besides its own work: 0 in the usual case.
  enum Attention : std::uint32_t {
    kSignals = 0xff,      // CommSignal
    kFailed = 0x100,      // failure() is not kNone
    kPosting = 0x200,     // a message waits for room in a send queue
    kMoreQueues = 0x400,  // there are more completion queues than the first: always
  };
  std::uint32_t attention() const { return attention_.load(std::memory_order_relaxed); }

  // The first error; every call answers with it from then on.
  const Error* error() const { return failure_ != ErrorKind::kNone ? &error_ : nullptr; }

 protected:
  Comm(CommKind kind, Context& context, Endpoint endpoint, ControlMemory control);

  // Any thread. Of a receive comm, which has QPs of its own for flushes.
  virtual bool flushes_with(const ibv_qp&) const { return false; }

  // The part of the control memory that the peer writes: the CTS ring or the completion record.
  virtual const void* written_by_peer() const = 0;
  // wire::Capability bits of our hello.
  virtual std::uint32_t capabilities() const = 0;

  void set_attention(Attention bit) { attention_.fetch_or(bit, std::memory_order_relaxed); }
  void clear_attention(Attention bit) { attention_.fetch_and(~bit, std::memory_order_relaxed); }

  ErrorKind failure() const { return failure_; }

  // Logs and keeps the first error of the comm; the ones that follow from it are silent. `describe` answers what
  // happened.
  template <typename Describe>
  void fail(ErrorKind kind, const char* operation, Describe describe) noexcept {
    if (!begin_failure(kind, operation)) return;
    try {
      report(describe());
    } catch (...) {
      report_without_memory();
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
  int poll_first() { return ibv_poll_cq(first_cq_, kPollBatch, completions_); }
  // What a poll of the first queue left to do, when it found `taken` or attention() asks for it: the other queues,
  // failures, signals.
  template <typename Complete>
  void poll_rest(int taken, Complete complete) {
    bool all = taken < kPollBatch;
    bool broken = taken < 0;
    for (const UniqueCq& cq : endpoint_.cqs().subspan(1)) {
      const int count = ibv_poll_cq(cq.get(), kPollBatch, completions_);
      for (int i = 0; i < count; ++i) complete(completions_[i]);
      all = all && count < kPollBatch;
      broken = broken || count < 0;
    }
    if (broken) fail_poll();
    if (unreported_) {
      for (const UniqueCq& cq : endpoint_.cqs()) {
        int count = 0;
        // No more than it can hold: a peer that goes on and on must not keep us here.
        for (int left = cq.get()->cqe; left > 0 && (count = ibv_poll_cq(cq.get(), kPollBatch, completions_)) > 0;
             left -= count) {
          for (int i = 0; i < count; ++i) complete(completions_[i]);
        }
      }
      report_completion();
    }
    if (all) hear_signals(false);
  }
  // Only when everything that has arrived was taken in: the completion queues were found empty. `starved`: the caller
  // waits for something of the peer.
  void hear_signals(bool starved) {
    if ((attention() & kSignals) != 0) obey_signals(starved);
  }
  // Whether the peer, or the device, is known to take nothing any more.
  bool doomed() const { return (attention() & kSignals & ~static_cast<std::uint32_t>(CommSignal::kPeerClosed)) != 0; }

  Watched<bool> polled_;  // something was tested in vain

  // A member, not a local array: calls that find nothing then save no registers.
  ibv_wc completions_[kPollBatch];
  Context& context_;
  ControlMemory control_;  // outlives the QPs through which the peer writes it
  Endpoint endpoint_;

 private:
  void obey_signals(bool starved) noexcept;
  // Whether this is the first failure.
  bool begin_failure(ErrorKind kind, const char* operation) noexcept;
  // Logs it and has the peer told.
  void report(std::string what) noexcept;
  void report_without_memory() noexcept;
  void report_completion() noexcept;
  const char* verdict() const { return verdict_ != nullptr ? verdict_.get() : "no memory to say why"; }
  PathFacts facts(std::size_t qp) const;
  std::string describe_event() const;
  bool await_event() const;
  void fail_poll() noexcept;
  void tell_peer() noexcept;

  ibv_cq* const first_cq_;
  std::atomic<std::uint32_t> attention_{0};
  ErrorKind failure_ = ErrorKind::kNone;
  const CommKind kind_;
  std::uint64_t peer_end_seen_ns_ = 0;
  Error error_;
  std::string failure_text_;
  std::atomic<bool> failure_told_{false};  // the text stands
  const ControlThread* watcher_ = nullptr;
  ErrorKind verdict_kind_ = ErrorKind::kRemote;
  std::unique_ptr<char[]> verdict_;  // a peer's text, and who said it: few connections ever need the room
  // The completion that failed, until it is reported.
  struct {
    ibv_wc completion;
    std::size_t qp;
    FailedWork work;
  } failed_ = {};
  bool unreported_ = false;
  std::uint64_t flushed_ = 0;                              // work requests that ended with it
  std::atomic<ibv_event_type> event_{IBV_EVENT_COMM_EST};  // what kDeviceFailed stands for
  UniqueFd side_channel_;
};

// The registrable ends of connections, from NCCL's void*.
inline Comm* as_comm(void* comm) {
  return static_cast<Comm*>(comm);
}

}  // namespace verbatim
