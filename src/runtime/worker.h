// The threads of the plugin. No signal of the application is handled on them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/result.h"

namespace verbatim {

// Makes `thread`. `name`: at most 15 characters. Errors: of pthread_create.
Status start_thread(std::thread& thread, const char* name, std::function<void()> body) noexcept;

// A thread for work that may last, such as verbs of a device that hangs. It is made when there is work, and ends when
// there is none. Any thread may call the public functions, also with a mutex that the work locks.
class Worker {
 public:
  // Does a piece of the work, on the thread, without a lock. Returns when the next one is due, in nanoseconds of the
  // monotonic clock: 0 is at once, and kNever not before the next call of wake(). It must not throw.
  using Work = std::function<std::uint64_t()>;

  Worker(const char* name, Work work) : name_(name), work_(std::move(work)) {}
  // Waits for the piece that is being done. The caller has no mutex that the work locks.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // There is a piece to do now. An error: its thread could not be made, and nothing is done until the next call.
  Status wake() noexcept VERBATIM_EXCLUDES(mutex_);

 private:
  void run() noexcept VERBATIM_EXCLUDES(mutex_);

  const char* const name_;
  const Work work_;
  Mutex mutex_;
  std::condition_variable_any wake_;
  bool running_ VERBATIM_GUARDED_BY(mutex_) = false;
  bool woken_ VERBATIM_GUARDED_BY(mutex_) = false;
  bool stops_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace verbatim
