// Runs the send queues: round robin over the QPs that have work, each for a bounded number of bytes. The `thread`
// engine does so in a thread of its own, as a device would; `inline` in whatever thread posts, and for work that has
// to wait (receiver not ready, lost peer) in whatever thread polls.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <set>
#include <utility>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/host/settings.h"

namespace verbatim::softverbs {

class Link;
class Process;
struct EngineCounters;
struct Qp;
enum class Step;

// What the engine knows of a QP; guarded by the engine's mutex, except that only its runner touches a kRunning one.
enum class Schedule : std::uint8_t { kIdle, kReady, kRunning, kRunningAgain, kWaiting, kWaitingDeferred };

struct ScheduleEntry {
  Schedule schedule = Schedule::kIdle;
  std::uint64_t due_ns = 0;  // when kWaiting or kLingering
};

// Thread-safe.
class Engine {
 public:
  Engine(const Settings& settings, Link* link) : threaded_(settings.threaded), settings_(settings), link_(link) {}

  // Called once, before anything else. EAGAIN: a device thread cannot be had.
  Status start(Process& process);
  // No QP is run any more, now or later; waits a bounded time for the one that is. For the end of the process.
  void stop();

  bool is_threaded() const { return threaded_; }

  // The QP has new work. With the inline engine it is done on return, unless it has to wait.
  void submit(Qp& qp);
  // The same for a QP that may wait for a timer which no longer matters: its state has changed.
  void submit_now(Qp& qp);
  // On return the engine does not run this QP and never will.
  void remove(Qp& qp);

  // Around whatever executes requests. False: none must be executed any more.
  bool enter() {
    running_.fetch_add(1, std::memory_order_seq_cst);
    if (!stopping_.load(std::memory_order_seq_cst)) return true;  // either we see it, or stop() sees that we run
    leave();
    return false;
  }
  void leave() { running_.fetch_sub(1, std::memory_order_seq_cst); }

  // Called by every poll: with the inline engine it does what has become due.
  void progress() {
    if (threaded_) return;
    if (earliest_due_ns_.load(std::memory_order_relaxed) != kNever || is_service_pending()) progress_inline();
  }

  // From that time on, once, FaultStates::serve() is called; UINT64_MAX: not at all.
  void set_alarm(std::uint64_t due_ns);

  // Nanoseconds until work of the inline engine becomes due; UINT64_MAX when there is none.
  std::uint64_t idle_ns() const;

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  static constexpr std::uint64_t kAtNextPoll = kNever - 1;  // not a time: the inline engine's next look

  bool is_service_pending() const { return service_pending_->load(std::memory_order_relaxed) != 0; }
  static void* thread_main(void* engine);
  void run_thread();
  void spin_then_sleep();
  void progress_inline();
  void drain();
  void schedule(Qp& qp, bool ends_wait);
  void make_ready(Qp& qp) VERBATIM_REQUIRES(mutex_);
  void remove_from_backlog(Qp& qp) VERBATIM_REQUIRES(mutex_);
  std::deque<Qp*>::iterator choose() VERBATIM_REQUIRES(mutex_);
  Qp* next();
  std::uint64_t next_quantum() const;
  void run(Qp& qp, EngineCounters* counters);  // nullptr: in a thread of the program's
  void end_run(Qp& qp, Step step, std::uint64_t due_ns, std::uint64_t bytes_sent);
  void process_service_requests();
  void remove_deferred_wait(Qp& qp) VERBATIM_REQUIRES(mutex_);
  void make_deferred_ready();
  void run_due_faults();
  std::uint64_t earliest_due() const VERBATIM_REQUIRES(mutex_);

  const bool threaded_;
  const Settings& settings_;
  Link* const link_;  // nullptr: no port has a rate
  Process* process_ = nullptr;
  const std::atomic<std::uint32_t>* service_pending_ = nullptr;  // Segment's
  std::atomic<std::uint64_t> earliest_due_ns_{kNever};
  std::atomic<std::uint64_t> alarm_ns_{kNever};
  std::atomic<std::uint32_t> ready_count_{0};
  std::atomic<std::uint32_t> deferred_wait_count_{0};  // of the inline engine
  std::atomic<std::uint32_t> running_{0};
  std::atomic<bool> stopping_{false};
  mutable Mutex mutex_;
  // Of each port with a rate
  std::array<std::uint32_t, kMaxDevices> last_qpn_ VERBATIM_GUARDED_BY(mutex_){};
  std::uint32_t releases_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::deque<Qp*> ready_ VERBATIM_GUARDED_BY(mutex_);
  std::set<std::pair<std::uint64_t, Qp*>> waiting_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim::softverbs
