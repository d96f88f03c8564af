// A mutex with annotations for clang's thread-safety analysis (-Wthread-safety). Other compilers ignore the
// annotations.
#pragma once

#include <mutex>

#if defined(__clang__)
#define VERBATIM_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define VERBATIM_THREAD_ANNOTATION(x)
#endif

#define VERBATIM_GUARDED_BY(m) VERBATIM_THREAD_ANNOTATION(guarded_by(m))
#define VERBATIM_REQUIRES(...) VERBATIM_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define VERBATIM_EXCLUDES(...) VERBATIM_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace verbatim {

class VERBATIM_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  void lock() VERBATIM_THREAD_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void unlock() VERBATIM_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  bool try_lock() VERBATIM_THREAD_ANNOTATION(try_acquire_capability(true)) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

class VERBATIM_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) VERBATIM_THREAD_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() VERBATIM_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace verbatim
