#include "softverbs/engine/engine.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/log.h"
#include "softverbs/engine/attempt.h"
#include "softverbs/engine/events.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/requester.h"
#include "softverbs/fabric/link.h"
#include "softverbs/faults/faults.h"
#include "softverbs/gpu/gpu.h"
#include "softverbs/host/device_thread.h"
#include "softverbs/host/with_memory.h"
#include "softverbs/memory/copier.h"

namespace verbatim::softverbs {
namespace {

// The limits of one QP's turn, in bytes and in requests. The limit in bytes is lower while other QPs wait: a QP with
// long messages then does not delay one with short messages, and both get the same share of bytes, as on a NIC that
// arbitrates by packet.
constexpr std::uint64_t kQuantumBytes = kStepBytes;
constexpr std::uint64_t kSharedQuantumBytes = 1U << 16;
constexpr unsigned kQuantumRequests = 32;

// How long an idle engine thread polls before it sleeps: about the time that it takes to wake it.
constexpr std::uint64_t kSpinNs = 20'000;

// How long an ending process waits for its engine.
constexpr std::uint64_t kStopNs = kNanosecondsPerSecond;
constexpr useconds_t kStopPauseUs = 50;

}  // namespace

Status Engine::start(Process& process) {
  process_ = &process;
  service_pending_ = &process.segment().service_pending;
  if (!threaded_) return {};
  int error = 0;
  unsigned started = 0;
  for (; started < settings_.engines; ++started) {
    error = start_thread("softverbs", thread_main, this);
    if (error != 0) break;
  }
  if (error == 0) return {};
  VERBATIM_WARN("only %u of %u device threads can be started: %s. Next: lower SOFTVERBS_ENGINES", started,
                settings_.engines, std::strerror(error));
  if (started != 0) return {};
  return system_error("pthread_create", error);
}

void Engine::stop() {
  stopping_.store(true, std::memory_order_seq_cst);
  ring_doorbell(process_->segment());
  // A step takes well under a millisecond. It does not end if stop() runs in a signal handler that interrupted the
  // step.
  for (const std::uint64_t end = monotonic_ns() + kStopNs; running_.load(std::memory_order_seq_cst) != 0;) {
    if (monotonic_ns() >= end) return;
    ::usleep(kStopPauseUs);
  }
}

void* Engine::thread_main(void* engine) {
  static_cast<Engine*>(engine)->run_thread();
  return nullptr;
}

void Engine::run_thread() {
  CurrentGpu::keep_in_this_thread();
  Segment& segment = process_->segment();
  EngineCounters& counters = segment.engines[segment.engine_threads.fetch_add(1, std::memory_order_relaxed)];
  while (!stopping_.load(std::memory_order_relaxed)) {
    process_service_requests();
    run_due_faults();
    const std::uint32_t changes = link_ != nullptr ? link_->changes() : 0;
    if (Qp* qp = next(); qp != nullptr) {
      // This thread may have kept those who rang from waking others.
      if (ready_count_.load(std::memory_order_relaxed) != 0) ring_doorbell(segment);
      run(*qp, &counters);
    } else if (link_ != nullptr && ready_count_.load(std::memory_order_seq_cst) != 0) {
      link_->wait(changes);
    } else {
      spin_then_sleep();
    }
  }
}

void Engine::spin_then_sleep() {
  Segment& segment = process_->segment();
  const auto has_work = [&] {
    return ready_count_.load(std::memory_order_seq_cst) != 0 || stopping_.load(std::memory_order_seq_cst) ||
           segment.service_pending.load(std::memory_order_seq_cst) != 0;
  };
  std::uint64_t now = monotonic_ns();
  const std::uint64_t polls_until = std::min(now + kSpinNs, earliest_due_ns_.load(std::memory_order_relaxed));
  segment.polling.fetch_add(1, std::memory_order_seq_cst);
  bool found = false;
  for (; now < polls_until && !found; now = monotonic_ns()) {
    found = has_work();
    if (!found) sched_yield();
  }
  segment.polling.fetch_sub(1, std::memory_order_seq_cst);  // before has_work() below: see ring_doorbell()
  if (found || earliest_due_ns_.load(std::memory_order_relaxed) <= now) return;
  segment.sleeping.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t wake_count = segment.doorbell.load(std::memory_order_seq_cst);
  const std::uint64_t due = earliest_due_ns_.load(std::memory_order_relaxed);  // it may have changed meanwhile
  if (!has_work() && due > now) {
    const std::uint64_t wait_ns = due == kNever ? 0 : due - now;
    const timespec timeout{static_cast<time_t>(wait_ns / kNanosecondsPerSecond),
                           static_cast<long>(wait_ns % kNanosecondsPerSecond)};
    ::syscall(SYS_futex, &segment.doorbell, FUTEX_WAIT, wake_count, due == kNever ? nullptr : &timeout, nullptr, 0);
  }
  segment.sleeping.fetch_sub(1, std::memory_order_relaxed);
}

void Engine::submit(Qp& qp) {
  schedule(qp, false);
  if (threaded_) {
    ring_doorbell(process_->segment());
  } else {
    drain();
  }
}

void Engine::submit_now(Qp& qp) {
  schedule(qp, true);
  if (threaded_) {
    ring_doorbell(process_->segment());
  } else {
    drain();
  }
}

void Engine::schedule(Qp& qp, bool ends_wait) {
  ScheduleEntry& entry = qp.schedule;
  MutexLock lock(mutex_);
  switch (entry.schedule) {
    case Schedule::kIdle:
      break;
    case Schedule::kWaiting:
      if (!ends_wait) return;
      [[fallthrough]];
    case Schedule::kWaitingDeferred:
      end_wait(qp);
      break;
    case Schedule::kRunning:
      entry.schedule = Schedule::kRunningAgain;
      return;
    case Schedule::kRunningAgain:
    case Schedule::kReady:
      return;
  }
  make_ready(qp);
}

void Engine::make_ready(Qp& qp) {
  qp.schedule.schedule = Schedule::kReady;
  ready_.splice(ready_.end(), qp.schedule.ready);
  ready_count_.fetch_add(1, std::memory_order_seq_cst);
  if (link_ != nullptr) link_->add_backlog(qp.shared->device);
}

// Called for a QP that leaves the state kReady or kRunning.
void Engine::remove_from_backlog(Qp& qp) {
  if (link_ != nullptr) link_->remove_backlog(qp.shared->device);
}

// The QP to run next; ready_.end(): none now.
std::list<Qp*>::iterator Engine::choose() {
  if (link_ == nullptr) return ready_.begin();
  const std::optional<std::uint32_t> device = link_->acquire_grant();
  if (!device) return ready_.end();
  if (releases_ != link_->releases()) {
    releases_ = link_->releases();
    last_qpn_ = {};
  }
  // Lowest rank first: round robin by QP number, or the oldest request. A QP without a pending request needs no time on
  // the link.
  const std::uint32_t last = last_qpn_[*device];
  const auto rank = [&](const Qp& qp) {
    if (!settings_.by_arrival) return std::uint64_t{qp.qp_num - last - 1};
    const std::uint32_t next = qp.sends.sent.load(std::memory_order_relaxed);
    if (next == qp.sends.posted.load(std::memory_order_acquire)) return std::uint64_t{0};
    return qp.sends.requests[next & qp.sends.mask].arrival;
  };
  auto best = ready_.end();
  for (auto at = ready_.begin(); at != ready_.end(); ++at) {
    if ((*at)->shared->device == *device && (best == ready_.end() || rank(**at) < rank(**best))) best = at;
  }
  if (best != ready_.end()) {
    last_qpn_[*device] = (*best)->qp_num;
  } else {
    link_->return_grant();
  }
  return best;
}

Qp* Engine::next() {
  MutexLock lock(mutex_);
  if (!waiting_.empty()) {
    const std::uint64_t now = monotonic_ns();
    while (!waiting_.empty() && waiting_.begin()->first.first <= now) {
      Qp& due = *waiting_.begin()->second;
      end_wait(due);
      make_ready(due);
    }
  }
  // Also after another thread has removed the entry: a due time in the past would keep the thread from sleeping.
  earliest_due_ns_.store(earliest_due(), std::memory_order_relaxed);
  if (ready_.empty() || !enter()) return nullptr;
  const auto chosen = choose();
  if (chosen == ready_.end()) {
    leave();
    return nullptr;
  }
  Qp* qp = *chosen;
  take_ready(chosen);
  qp->schedule.schedule = Schedule::kRunning;
  return qp;
}

std::uint64_t Engine::next_quantum() const {
  if (link_ != nullptr) return settings_.quantum_bytes;
  return ready_count_.load(std::memory_order_relaxed) != 0 ? kSharedQuantumBytes : kQuantumBytes;
}

void Engine::run(Qp& qp, EngineCounters* counters) {
  Step step = Step::kMore;
  std::uint64_t due = 0;
  std::uint64_t bytes_sent = 0;
  std::uint32_t requests = 0;
  {
    SharedLockGuard lock(qp.execution, process_->me());
    const std::uint64_t bytes_before = qp.requester.bytes_sent;
    const std::uint32_t before = qp.requester.sent;
    std::uint64_t quantum = next_quantum();
    for (unsigned done = 0; step == Step::kMore && done < kQuantumRequests && quantum > 0; ++done) {
      step = advance(qp, quantum);
    }
    due = step == Step::kWaitDeferred ? qp.deferred.deadline_ns() : qp.requester.due_ns;
    bytes_sent = qp.requester.bytes_sent - bytes_before;
    requests = qp.requester.sent - before;
  }
  if (counters != nullptr) counters->requests.add(requests);
  end_run(qp, step, due, bytes_sent);
  leave();  // after finish_grant: stop() must wait until the trace is written
}

void Engine::end_run(Qp& qp, Step step, std::uint64_t due_ns, std::uint64_t bytes_sent) {
  MutexLock lock(mutex_);
  const bool again = qp.schedule.schedule == Schedule::kRunningAgain;
  if ((step == Step::kWait || step == Step::kWaitDeferred) && !again) {
    if (step == Step::kWaitDeferred && !threaded_) {
      due_ns = kAtNextPoll;
      deferred_wait_count_.fetch_add(1, std::memory_order_relaxed);
    }
    ScheduleEntry& entry = qp.schedule;
    entry.schedule = step == Step::kWait ? Schedule::kWaiting : Schedule::kWaitingDeferred;
    entry.due_ns = due_ns;
    entry.waiting.key() = {due_ns, qp.handle};
    waiting_.insert(std::move(entry.waiting));
    earliest_due_ns_.store(earliest_due(), std::memory_order_relaxed);
  } else if (step != Step::kIdle || again) {
    make_ready(qp);
  } else {
    qp.schedule.schedule = Schedule::kIdle;
  }
  if (link_ == nullptr) return;
  remove_from_backlog(qp);  // after make_ready: a port with more to send must not look idle in between
  const Requester& requester = qp.requester;
  link_->finish_grant(qp.shared->device, {qp.qp_num, requester.dest_qpn, requester.peer_slot, requester.peer_device,
                                          requester.peer_pid, bytes_sent});
}

void Engine::remove(Qp& qp) {
  for (;;) {
    {
      MutexLock lock(mutex_);
      switch (qp.schedule.schedule) {
        case Schedule::kIdle:
          return;
        case Schedule::kReady:
          take_ready(std::find(ready_.begin(), ready_.end(), &qp));
          remove_from_backlog(qp);
          qp.schedule.schedule = Schedule::kIdle;
          return;
        case Schedule::kWaiting:
        case Schedule::kWaitingDeferred:
          end_wait(qp);
          qp.schedule.schedule = Schedule::kIdle;
          return;
        case Schedule::kRunning:
        case Schedule::kRunningAgain:
          break;
      }
    }
    sched_yield();
  }
}

void Engine::drain() {
  process_service_requests();
  while (Qp* qp = next()) {
    run(*qp, nullptr);
    process_service_requests();
  }
}

void Engine::take_ready(std::list<Qp*>::iterator at) {
  std::list<Qp*>& entry = (*at)->schedule.ready;
  entry.splice(entry.end(), ready_, at);
  ready_count_.fetch_sub(1, std::memory_order_relaxed);
}

// Called for a QP in kWaiting or kWaitingDeferred.
void Engine::end_wait(Qp& qp) {
  ScheduleEntry& entry = qp.schedule;
  entry.waiting = waiting_.extract({entry.due_ns, qp.handle});
  if (entry.schedule == Schedule::kWaitingDeferred && !threaded_)
    deferred_wait_count_.fetch_sub(1, std::memory_order_relaxed);
}

// Each QP with deferred payloads checks once whether they are due.
void Engine::make_deferred_ready() {
  MutexLock lock(mutex_);
  for (auto at = waiting_.lower_bound({kAtNextPoll, 0}); at != waiting_.end();) {
    Qp& qp = *(at++)->second;
    end_wait(qp);
    make_ready(qp);
  }
}

void Engine::progress_inline() {
  const std::uint64_t due = earliest_due_ns_.load(std::memory_order_relaxed);
  const bool has_deferred = deferred_wait_count_.load(std::memory_order_relaxed) != 0;
  if (!has_deferred && !is_service_pending() && (due >= kAtNextPoll || monotonic_ns() < due)) return;
  if (has_deferred) make_deferred_ready();
  run_due_faults();
  drain();
}

std::uint64_t Engine::idle_ns() const {
  const std::uint64_t due = earliest_due_ns_.load(std::memory_order_relaxed);
  if (due == kNever) return kNever;
  const std::uint64_t now = monotonic_ns();
  return due > now ? due - now : 0;
}

std::uint64_t Engine::earliest_due() const {
  const std::uint64_t alarm = alarm_ns_.load(std::memory_order_relaxed);
  return waiting_.empty() ? alarm : std::min(alarm, waiting_.begin()->first.first);
}

void Engine::set_alarm(std::uint64_t due_ns) {
  {
    MutexLock lock(mutex_);
    alarm_ns_.store(due_ns, std::memory_order_relaxed);
    earliest_due_ns_.store(earliest_due(), std::memory_order_relaxed);
  }
  if (due_ns != kNever && threaded_) ring_doorbell(process_->segment());
}

void Engine::run_due_faults() {
  const std::uint64_t due = alarm_ns_.load(std::memory_order_relaxed);
  if (due == kNever || monotonic_ns() < due) return;
  Faults* const all = faults();
  if (all == nullptr || with_memory([&] { all->states().serve(); })) return;
  VERBATIM_WARN("a fault clause has no effect: %s", std::strerror(ENOMEM));
}

void Engine::process_service_requests() {
  Segment& segment = process_->segment();
  if (segment.service_pending.load(std::memory_order_relaxed) == 0) return;
  // Acquire: what was requested is read behind it.
  segment.service_pending.exchange(0, std::memory_order_seq_cst);
  start_copier_if_wanted(segment, process_->arena(), process_->segment_fd());
  process_->apply_fault_commands();
  write_events_of_peers(*process_);
  for (std::uint32_t word = 0; word < kMaxQps / 64; ++word) {
    std::uint64_t bits = segment.failed_qps[word].exchange(0, std::memory_order_acq_rel);
    for (; bits != 0; bits &= bits - 1) {
      const auto index = word * 64 + static_cast<std::uint32_t>(__builtin_ctzll(bits));
      process_->with_qp(index, [&](Qp& qp) { schedule(qp, true); });
    }
  }
}

}  // namespace verbatim::softverbs
