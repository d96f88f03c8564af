// A lock that lies in shared memory, between the processes of one host. It outlives its holder's death: the word names
// the process that holds it, and whoever waits takes over from one that is gone. What it guards must therefore be
// usable after a stop at any instruction.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "base/mutex.h"

namespace verbatim::softverbs {

// Numbers a process for the life of the registry; never used twice, 0 is nobody.
using Incarnation = std::uint32_t;

// Whether that process still runs. A system call; asked only by those who have waited long.
bool is_alive(Incarnation incarnation);

inline void relax_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
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

  // Gives up after `yields` turns of the scheduler: a holder that was stopped must not stop us.
  bool lock_within(Incarnation me, unsigned yields) VERBATIM_THREAD_ANNOTATION(try_acquire_capability(true)) {
    return try_lock(me) || wait_and_lock(me, yields);
  }

  // A process that has left while some thread of it still held the lock has lost it to whoever waited.
  void unlock(Incarnation me) VERBATIM_THREAD_ANNOTATION(release_capability()) {
    std::uint64_t word = word_.load(std::memory_order_relaxed);
    if (holder(word) == me) word_.compare_exchange_strong(word, word - me + kUnlockCount, std::memory_order_release);
  }

  // Returns when whoever holds the lock now has let go of it once; later holders are not waited for.
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

  // High half: counts the unlocks, so that a waiter tells one holder's turn from the next. Low half: the holder.
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
