// The descriptors that the monitor's loop waits for, and the wake-ups that other threads send to it.
#pragma once

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

#include "base/result.h"
#include "base/unique_fd.h"

namespace verbatim {

enum class PollSource : std::uint32_t { kWake, kConnection, kAttempt, kListener, kDevice, kStateSocket, kSocketEnd };

// Owned by the monitor. wait() is the monitoring thread's; any thread may call the rest, with or without a lock.
class Poller {
 public:
  Status open() {
    epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_) return system_error("epoll_create1", errno);
    wake_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!wake_) return system_error("eventfd", errno);
    return add(wake_.get(), PollSource::kWake);
  }

  // Reports `fd` as long as it is readable; `id` distinguishes the descriptors of one source.
  Status add(int fd, PollSource source, std::uint32_t id = 0) const {
    return set(EPOLL_CTL_ADD, fd, EPOLLIN, source, id);
  }
  // Reports `fd` once, and again only after the next call. It is forgotten when it is closed.
  void add_or_rearm(int fd, PollSource source) const {
    if (!rearm(fd, source, 0)) static_cast<void>(add_one_shot(fd, source, 0));
  }
  // Reports `fd` once, and again only after rearm().
  Status add_one_shot(int fd, PollSource source, std::uint32_t id) const {
    return set(EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLONESHOT, source, id);
  }
  Status rearm(int fd, PollSource source, std::uint32_t id) const {
    return set(EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT, source, id);
  }
  // The same when `fd` is writable; rearm() makes it readable.
  Status add_writable(int fd, PollSource source, std::uint32_t id) const {
    return set(EPOLL_CTL_ADD, fd, EPOLLOUT | EPOLLONESHOT, source, id);
  }
  Status rearm_writable(int fd, PollSource source, std::uint32_t id) const {
    return set(EPOLL_CTL_MOD, fd, EPOLLOUT | EPOLLONESHOT, source, id);
  }
  // Reports once that the peer of the socket `fd` sends nothing more, or that the connection has failed.
  Status add_end(int fd, PollSource source, std::uint32_t id) const {
    return set(EPOLL_CTL_ADD, fd, EPOLLRDHUP | EPOLLONESHOT, source, id);
  }
  void remove(int fd) const { static_cast<void>(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr)); }

  void wake() const {
    const std::uint64_t one = 1;
    // A full counter also fails the write: then a wake-up is pending already.
    while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) continue;
  }

  // Calls handle(source, id) for each readable descriptor but the one of wake-ups. `timeout_ms` -1: no timeout.
  template <typename Handle>
  void wait(int timeout_ms, Handle handle) const {
    constexpr int kMaxEvents = 32;
    epoll_event events[kMaxEvents];
    const int count = ::epoll_wait(epoll_.get(), events, kMaxEvents, timeout_ms);
    for (int i = 0; i < count; ++i) {
      const auto source = static_cast<PollSource>(events[i].data.u64 >> 32);
      if (source != PollSource::kWake) {
        handle(source, static_cast<std::uint32_t>(events[i].data.u64));
        continue;
      }
      std::uint64_t wakes = 0;
      static_cast<void>(!::read(wake_.get(), &wakes, sizeof wakes));
    }
  }

 private:
  Status set(int operation, int fd, std::uint32_t events, PollSource source, std::uint32_t id) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = std::uint64_t{static_cast<std::uint32_t>(source)} << 32 | id;
    if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) return system_error("epoll_ctl", errno);
    return {};
  }

  UniqueFd epoll_;
  UniqueFd wake_;
};

}  // namespace verbatim
