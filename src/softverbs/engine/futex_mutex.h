// A mutex for the data path, where it is nearly always free: lock and unlock are one inlined atomic operation each. A
// contended lock waits in the kernel.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/mutex.h"

namespace verbatim::softverbs {

class VERBATIM_THREAD_ANNOTATION(capability("mutex")) FutexMutex {
 public:
  void lock() VERBATIM_THREAD_ANNOTATION(acquire_capability()) {
    std::uint32_t free = kFree;
    if (!word_.compare_exchange_strong(free, kLocked, std::memory_order_acquire)) wait_and_lock();
  }
  void unlock() VERBATIM_THREAD_ANNOTATION(release_capability()) {
    if (word_.exchange(kFree, std::memory_order_release) == kContended) wake_one();
  }

 private:
  static constexpr std::uint32_t kFree = 0;
  static constexpr std::uint32_t kLocked = 1;
  static constexpr std::uint32_t kContended = 2;  // locked, and a thread may sleep

  __attribute__((noinline, cold)) void wait_and_lock() {
    while (word_.exchange(kContended, std::memory_order_acquire) != kFree) {
      ::syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, kContended, nullptr, nullptr, 0);
    }
  }
  __attribute__((noinline, cold)) void wake_one() {
    ::syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }

  std::atomic<std::uint32_t> word_{kFree};
};

class VERBATIM_THREAD_ANNOTATION(scoped_lockable) FutexLock {
 public:
  explicit FutexLock(FutexMutex& mutex) VERBATIM_THREAD_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~FutexLock() VERBATIM_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  FutexLock(const FutexLock&) = delete;
  FutexLock& operator=(const FutexLock&) = delete;

 private:
  FutexMutex& mutex_;
};

}  // namespace verbatim::softverbs
