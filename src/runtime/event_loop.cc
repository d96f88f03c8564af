#include "runtime/event_loop.h"

#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

namespace verbatim {

Status EventLoop::open() {
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return system_error("epoll_create1", errno);
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!timer_) return system_error("timerfd_create", errno);
  return watch(timer_.get(), EPOLLIN, 0, 0);  // no handler has the number 0: the timer only ends the wait
}

Status EventLoop::watch(int fd, std::uint32_t events, std::uint32_t handler, int id) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = std::uint64_t{handler} << 32 | static_cast<std::uint32_t>(id);
  int failed = ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  if (failed != 0 && errno == EEXIST) failed = ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
  return failed == 0 ? Status() : system_error("epoll_ctl", errno);
}

void EventLoop::run() noexcept {
  constexpr int kMaxEvents = 32;
  epoll_event events[kMaxEvents];
  while (prepare_wait()) {
    const int count = ::epoll_wait(epoll_.get(), events, kMaxEvents, -1);
    for (int i = 0; i < count; ++i) {
      call_ready(static_cast<std::uint32_t>(events[i].data.u64 >> 32), static_cast<int>(events[i].data.u64));
    }
    call_due();
  }
}

void EventLoop::stop() {
  const MutexLock lock(mutex_);
  stops_ = true;
  set_timer(0);
}

bool EventLoop::prepare_wait() {
  const MutexLock lock(mutex_);
  if (!stops_ && deadlines_.nearest_ns() != timer_ns_) set_timer(deadlines_.nearest_ns());
  return !stops_;
}

void EventLoop::set_timer(std::uint64_t at_ns) {
  timer_ns_ = at_ns;
  const std::uint64_t ns = at_ns == kNever ? 0 : std::max<std::uint64_t>(at_ns, 1);  // 0 is never
  const itimerspec time{
      {}, {static_cast<std::time_t>(ns / kNanosecondsPerSecond), static_cast<long>(ns % kNanosecondsPerSecond)}};
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &time, nullptr);
}

void EventLoop::call_ready(std::uint32_t handler, int id) {
  const MutexLock lock(mutex_);
  const auto found = handlers_.find(handler);
  if (found == handlers_.end()) return;
  const EventHandler& called = *(called_now_ = found->second);
  mutex_.unlock();
  called.ready_(id);
  mutex_.lock();
  called_now_ = nullptr;
  called_.notify_all();
}

// Who is due again at once is called after the others that are due, and after the descriptors.
void EventLoop::call_due() {
  const std::uint64_t now = monotonic_ns();
  const MutexLock lock(mutex_);
  for (std::size_t left = deadlines_.size(); left != 0 && deadlines_.nearest_ns() <= now; --left) {
    EventHandler& called = *deadlines_.nearest();
    deadlines_.set(called, kNever);
    called_now_ = &called;
    mutex_.unlock();
    const std::uint64_t next = called.due_();
    mutex_.lock();
    deadlines_.set(called, std::max(std::min(next, called.deadline_ns), now + 1));
    called_now_ = nullptr;
    called_.notify_all();
  }
}

EventHandler::EventHandler(EventLoop& loop, Ready ready, Due due)
    : loop_(loop), ready_(std::move(ready)), due_(std::move(due)) {
  const MutexLock lock(loop_.mutex_);
  if (due_) loop_.deadlines_.prepare();
  number_ = ++loop_.handlers_made_;
  loop_.handlers_.emplace(number_, this);
  if (due_) loop_.deadlines_.add(*this, kNever);
}

EventHandler::~EventHandler() {
  const MutexLock lock(loop_.mutex_);
  loop_.handlers_.erase(number_);
  while (loop_.called_now_ == this) loop_.called_.wait(loop_.mutex_);
  if (due_) loop_.deadlines_.remove(*this);
}

void EventHandler::unwatch(int fd) const {
  static_cast<void>(::epoll_ctl(loop_.epoll_.get(), EPOLL_CTL_DEL, fd, nullptr));
}

void EventHandler::call_at(std::uint64_t at_ns) {
  const MutexLock lock(loop_.mutex_);
  if (at_ns >= deadline_ns) return;
  loop_.deadlines_.set(*this, at_ns);
  if (at_ns < loop_.timer_ns_) loop_.set_timer(at_ns);
}

}  // namespace verbatim
