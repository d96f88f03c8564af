// Executes the send queues: round robin over the QPs that have work, a bounded number of bytes at a time. The `thread`
// engine does so in threads of its own, as hardware would; `inline` in the thread that posts, and in a thread that
// polls for work that has to wait (receiver not ready, no response).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <list>
#include <map>
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

// The engine's state of a QP. Guarded by the engine's mutex; only the thread that runs a kRunning QP ends that state.
enum class Schedule : std::uint8_t { kIdle, kReady, kRunning, kRunningAgain, kWaiting, kWaitingDeferred };

// By due time and index: the order must not follow from addresses.
using WaitingQps = std::map<std::pair<std::uint64_t, std::uint32_t>, Qp*>;

// Made with the QP, so that the engine needs no memory to schedule it.
struct ScheduleEntry {
  explicit ScheduleEntry(Qp& qp) : ready{&qp} {
    WaitingQps one;
    one.emplace(WaitingQps::key_type{}, &qp);
    waiting = one.extract(one.begin());
  }

  Schedule schedule = Schedule::kIdle;
  std::uint64_t due_ns = 0;       // when kWaiting or kWaitingDeferred
  std::list<Qp*> ready;           // its entry of Engine::ready_ while it is not there
  WaitingQps::node_type waiting;  // the same of Engine::waiting_
};

// Owned by Process. Thread-safe.
class Engine {
 public:
  Engine(const Settings& settings, Link* link) : threaded_(settings.threaded), settings_(settings), link_(link) {}

  // Called once, before anything else. EAGAIN: no device thread can be started.
  Status start(Process& process);
  // Runs no QP from now on. Waits a limited time for the QPs that run now. Called when the process ends.
  void stop();

  bool is_threaded() const { return threaded_; }

  // The QP has new work. The inline engine executes it before it returns, unless the work has to wait.
  void submit(Qp& qp);
  // The same, and ends a wait for a timer, which no longer applies because the QP's state has changed.
  void submit_now(Qp& qp);
  // When it returns, the engine does not run this QP and will not run it later.
  void remove(Qp& qp);

  // Must enclose every execution of requests. False: the engine has stopped, and nothing may be executed.
  bool enter() {
    running_.fetch_add(1, std::memory_order_seq_cst);
    if (!stopping_.load(std::memory_order_seq_cst)) return true;  // either we see stopping_, or stop() sees running_
    leave();
    return false;
  }
  void leave() { running_.fetch_sub(1, std::memory_order_seq_cst); }

  // Called by every poll: the inline engine does the work that is due.
  void progress() {
    if (threaded_) return;
    if (earliest_due_ns_.load(std::memory_order_relaxed) != kNever || is_service_pending()) progress_inline();
  }

  // Calls FaultStates::serve() once at or after that time; UINT64_MAX: never.
  void set_alarm(std::uint64_t due_ns);

  // Nanoseconds until work of the inline engine is due; UINT64_MAX: none.
  std::uint64_t idle_ns() const;

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  static constexpr std::uint64_t kAtNextPoll = kNever - 1;  // not a time: due at the inline engine's next poll

  bool is_service_pending() const { return service_pending_->load(std::memory_order_relaxed) != 0; }
  static void* thread_main(void* engine);
  void run_thread();
  void spin_then_sleep();
  void progress_inline();
  void drain();
  void schedule(Qp& qp, bool ends_wait);
  void make_ready(Qp& qp) VERBATIM_REQUIRES(mutex_);
  void remove_from_backlog(Qp& qp) VERBATIM_REQUIRES(mutex_);
  std::list<Qp*>::iterator choose() VERBATIM_REQUIRES(mutex_);
  Qp* next();
  std::uint64_t next_quantum() const;
  void run(Qp& qp, EngineCounters* counters);  // nullptr: in a thread of the program
  void end_run(Qp& qp, Step step, std::uint64_t due_ns, std::uint64_t bytes_sent);
  void process_service_requests();
  void end_wait(Qp& qp) VERBATIM_REQUIRES(mutex_);
  void take_ready(std::list<Qp*>::iterator at) VERBATIM_REQUIRES(mutex_);
  void make_deferred_ready();
  void run_due_faults();
  std::uint64_t earliest_due() const VERBATIM_REQUIRES(mutex_);

  const bool threaded_;
  const Settings& settings_;
  Link* const link_;  // nullptr: the ports have no rate
  Process* process_ = nullptr;
  const std::atomic<std::uint32_t>* service_pending_ = nullptr;  // the field of Segment
  std::atomic<std::uint64_t> earliest_due_ns_{kNever};
  std::atomic<std::uint64_t> alarm_ns_{kNever};
  std::atomic<std::uint32_t> ready_count_{0};
  std::atomic<std::uint32_t> deferred_wait_count_{0};  // QPs in kWaitingDeferred, with the inline engine
  std::atomic<std::uint32_t> running_{0};
  std::atomic<bool> stopping_{false};
  mutable Mutex mutex_;
  // The QP that was granted last, for each port with a rate
  std::array<std::uint32_t, kMaxDevices> last_qpn_ VERBATIM_GUARDED_BY(mutex_){};
  std::uint32_t releases_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::list<Qp*> ready_ VERBATIM_GUARDED_BY(mutex_);
  WaitingQps waiting_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim::softverbs
