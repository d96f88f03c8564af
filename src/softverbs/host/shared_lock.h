// A lock in shared memory, between the processes of one host. Its word names the holding process. When that process
// dies, a waiting process takes the lock over. The guarded data must therefore be usable after a stop at any
// instruction.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "base/mutex.h"

namespace verbatim::softverbs {

// Identifies a process for the lifetime of the registry. Values are never reused; 0 means no process.
using Incarnation = std::uint32_t;

// Whether that process still runs. A system call: only waiters that have waited long call it.
bool is_alive(Incarnation incarnation);

inline void relax_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

class VERBATIM_THREAD_ANNOTATION(capability("mutex")) SharedLock {
 public:
  bool try_lock(Incarnation me) VERBATIM_THREAD_ANNOTATION(try_acquire_capability(true)) {
    std::uint64_t word = word_.load(std::memory_order_relaxed);
    return holder(word) == 0 && word_.compare_exchange_strong(word, word | me, std::memory_order_seq_cst);
  }

  void lock(Incarnation me) VERBATIM_THREAD_ANNOTATION(acquire_capability()) {
    if (!try_lock(me)) wait_and_lock(me, kForever);
  }

  // Gives up after `yields` calls of sched_yield, so that a stopped holder does not stop the caller.
  bool lock_within(Incarnation me, unsigned yields) VERBATIM_THREAD_ANNOTATION(try_acquire_capability(true)) {
    return try_lock(me) || wait_and_lock(me, yields);
  }

  // If this process left the registry while the thread held the lock, a waiter may have taken it over already.
  void unlock(Incarnation me) VERBATIM_THREAD_ANNOTATION(release_capability()) {
    std::uint64_t word = word_.load(std::memory_order_relaxed);
    if (holder(word) == me) word_.compare_exchange_strong(word, word - me + kUnlockCount, std::memory_order_release);
  }

  // Returns when the current holder has released the lock once. Does not wait for later holders.
  void wait_for_holder() const {
    const std::uint64_t first = word_.load(std::memory_order_seq_cst);
    if (holder(first) == 0) return;
    for (unsigned spin = 1; word_.load(std::memory_order_acquire) == first; ++spin) {
      if (spin <= kSpins) {
        relax_cpu();
        continue;
      }
      sched_yield();
      if (spin % kSpinsPerLivenessCheck == 0 && !is_alive(holder(first))) return;
    }
  }

 private:
  static constexpr unsigned kSpins = 100;
  static constexpr unsigned kSpinsPerLivenessCheck = 128;
  static constexpr unsigned kForever = ~0U;

  // High half: number of unlocks, so that a waiter distinguishes one hold from the next. Low half: the holder.
  static Incarnation holder(std::uint64_t word) { return static_cast<Incarnation>(word); }
  static constexpr std::uint64_t kUnlockCount = std::uint64_t{1} << 32;

  bool wait_and_lock(Incarnation me, unsigned yields) VERBATIM_THREAD_ANNOTATION(no_thread_safety_analysis) {
    for (unsigned spin = 1;; ++spin) {
      if (try_lock(me)) return true;
      if (spin <= kSpins) {
        relax_cpu();
        continue;
      }
      if (yields != kForever && spin - kSpins > yields) return false;
      sched_yield();
      if (spin % kSpinsPerLivenessCheck != 0) continue;
      std::uint64_t word = word_.load(std::memory_order_relaxed);
      if (holder(word) == 0 || is_alive(holder(word))) continue;
      if (word_.compare_exchange_strong(word, word - holder(word) + kUnlockCount + me, std::memory_order_seq_cst))
        return true;
    }
  }

  std::atomic<std::uint64_t> word_{0};
};

class VERBATIM_THREAD_ANNOTATION(scoped_lockable) SharedLockGuard {
 public:
  SharedLockGuard(SharedLock& lock, Incarnation me) VERBATIM_THREAD_ANNOTATION(acquire_capability(lock))
      : lock_(lock), me_(me) {
    lock_.lock(me);
  }
  ~SharedLockGuard() VERBATIM_THREAD_ANNOTATION(release_capability()) { lock_.unlock(me_); }
  SharedLockGuard(const SharedLockGuard&) = delete;
  SharedLockGuard& operator=(const SharedLockGuard&) = delete;

 private:
  SharedLock& lock_;
  const Incarnation me_;
};

}  // namespace verbatim::softverbs
