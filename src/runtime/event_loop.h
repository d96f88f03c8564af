// The loop of the plugin's one permanent thread. It waits until a descriptor is ready or a time has come, and calls the
// handlers of the plugin's parts.
#pragma once

#include <sys/epoll.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "runtime/deadlines.h"

namespace verbatim {

class EventHandler;

// Must outlive its handlers. Any thread may call the public functions but run(), also with a mutex.
class EventLoop {
 public:
  // Before run() and watch(). Errors: of epoll_create1, timerfd_create, epoll_ctl.
  Status open();
  // Calls the handlers, one at a time, until stop().
  void run() noexcept VERBATIM_EXCLUDES(mutex_);
  void stop() VERBATIM_EXCLUDES(mutex_);

 private:
  friend class EventHandler;

  Status watch(int fd, std::uint32_t events, std::uint32_t handler, int id) const;
  // Sets the timer to the nearest deadline. False: the loop stops.
  bool prepare_wait() VERBATIM_EXCLUDES(mutex_);
  void set_timer(std::uint64_t at_ns) VERBATIM_REQUIRES(mutex_);
  void call_ready(std::uint32_t handler, int id) VERBATIM_EXCLUDES(mutex_);
  void call_due() VERBATIM_EXCLUDES(mutex_);

  UniqueFd epoll_;
  UniqueFd timer_;  // stays readable from its time on until it is set again
  Mutex mutex_;
  std::condition_variable_any called_;  // a call of a handler has returned
  std::map<std::uint32_t, EventHandler*> handlers_ VERBATIM_GUARDED_BY(mutex_);
  Deadlines<EventHandler> deadlines_ VERBATIM_GUARDED_BY(mutex_);  // of those with `due`
  const EventHandler* called_now_ VERBATIM_GUARDED_BY(mutex_) = nullptr;
  std::uint32_t handlers_made_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::uint64_t timer_ns_ VERBATIM_GUARDED_BY(mutex_) = kNever;
  bool stops_ VERBATIM_GUARDED_BY(mutex_) = false;
};

// What the loop calls, on its thread and without a lock. Any thread may call the public functions, also with a mutex.
class EventHandler {
 public:
  // A descriptor is ready; `id`: that of watch(). One more call may come after unwatch(). It must not throw.
  using Ready = std::function<void(int id)>;
  // The time of call_at() has come. Returns when it is to be called again, in nanoseconds of the monotonic clock, or
  // kNever. It must not throw.
  using Due = std::function<std::uint64_t()>;
  enum Event : std::uint32_t {
    kReadable = EPOLLIN,
    kReadableOnce = EPOLLIN | EPOLLONESHOT,  // these two are reported again after the next watch()
    kWritableOnce = EPOLLOUT | EPOLLONESHOT,
  };

  EventHandler(EventLoop& loop, Ready ready, Due due = nullptr);
  // Waits while it is called; after it no call is made. Not to be called by the handler, nor with a mutex that it
  // locks. What it watches for kReadable was closed or unwatched before, or the loop has stopped.
  ~EventHandler();
  EventHandler(const EventHandler&) = delete;
  EventHandler& operator=(const EventHandler&) = delete;

  // From now on `event` is reported, and no other. A descriptor that is closed is forgotten. Errors: of epoll_ctl.
  Status watch(int fd, Event event, int id = 0) const { return loop_.watch(fd, event, number_, id); }
  void unwatch(int fd) const;
  // Only with `due`: it is called at this time, or at an earlier one that was asked for before. 0: at once.
  void call_at(std::uint64_t at_ns) VERBATIM_EXCLUDES(loop_.mutex_);

 private:
  friend class EventLoop;
  friend class Deadlines<EventHandler>;

  EventLoop& loop_;
  const Ready ready_;
  const Due due_;
  std::uint32_t number_ = 0;
  // Of EventLoop::deadlines_. NOLINTBEGIN(readability-identifier-naming): Deadlines needs these names.
  std::uint32_t heap_index = 0;
  std::uint64_t deadline_ns = kNever;
  // NOLINTEND(readability-identifier-naming)
};

}  // namespace verbatim
