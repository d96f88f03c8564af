#include "runtime/worker.h"

#include <pthread.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <new>
#include <system_error>
#include <utility>

namespace verbatim {

Status start_thread(std::thread& thread, const char* name, std::function<void()> body) noexcept {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // a thread inherits the mask
  Status started;
  try {
    thread = std::thread([name, body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), name);
      body();
    });
  } catch (const std::system_error& error) {
    started = system_error("pthread_create", error.code().value());
  } catch (const std::bad_alloc&) {
    started = system_error("pthread_create", ENOMEM);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

Worker::~Worker() {
  {
    const MutexLock lock(mutex_);
    stops_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status Worker::wake() noexcept {
  const MutexLock lock(mutex_);
  woken_ = true;
  wake_.notify_all();
  if (running_) return {};
  if (thread_.joinable()) thread_.join();  // it needs the mutex no more
  const Status started = start_thread(thread_, name_, [this] { run(); });
  running_ = bool{started};
  return started;
}

void Worker::run() noexcept {
  std::uint64_t due_ns = kNever;
  while (true) {
    {
      const MutexLock lock(mutex_);
      const std::chrono::steady_clock::time_point due{std::chrono::nanoseconds(due_ns)};
      const auto must_not_wait = [this]() VERBATIM_REQUIRES(mutex_) { return woken_ || stops_; };
      if (due_ns != 0 && due_ns != kNever) wake_.wait_until(mutex_, due, must_not_wait);
      running_ = !stops_ && (std::exchange(woken_, false) || due_ns != kNever);
      if (!running_) return;
    }
    due_ns = work_();
  }
}

}  // namespace verbatim
