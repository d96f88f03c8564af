// A mutex for the data path, where it is nearly always free: two instructions that matter, inlined. Who finds it taken
// waits in the kernel.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/mutex.h"

namespace verbatim::softverbs {

class VERBATIM_THREAD_ANNOTATION(capability("mutex")) QuickMutex {
 public:
  void lock() VERBATIM_THREAD_ANNOTATION(acquire_capability()) {
    std::uint32_t free = kFree;
    if (!word_.compare_exchange_strong(free, kTaken, std::memory_order_acquire)) wait_and_lock();
  }
  void unlock() VERBATIM_THREAD_ANNOTATION(release_capability()) {
    if (word_.exchange(kFree, std::memory_order_release) == kAwaited) wake_one();
  }

 private:
  static constexpr std::uint32_t kFree = 0;
  static constexpr std::uint32_t kTaken = 1;
  static constexpr std::uint32_t kAwaited = 2;  // taken, and somebody may sleep

  __attribute__((noinline, cold)) void wait_and_lock() {
    while (word_.exchange(kAwaited, std::memory_order_acquire) != kFree) {
      ::syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, kAwaited, nullptr, nullptr, 0);
    }
  }
  __attribute__((noinline, cold)) void wake_one() {
    ::syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }

  std::atomic<std::uint32_t> word_{kFree};
};

class VERBATIM_THREAD_ANNOTATION(scoped_lockable) QuickLock {
 public:
  explicit QuickLock(QuickMutex& mutex) VERBATIM_THREAD_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~QuickLock() VERBATIM_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  QuickLock(const QuickLock&) = delete;
  QuickLock& operator=(const QuickLock&) = delete;

 private:
  QuickMutex& mutex_;
};

}  // namespace verbatim::softverbs
