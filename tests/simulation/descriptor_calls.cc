// What reads, writes, waits for and closes descriptors. Files, which nobody waits for, are left to the kernel.
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string_view>

#include "simulation/clock.h"
#include "simulation/descriptors.h"
#include "simulation/interpose.h"

using namespace simulation;

SIMULATE(int, eventfd, (unsigned initial, int flags), (initial, flags))
int simulated_eventfd(unsigned initial, int flags) {
  const int fd = next_eventfd(initial, flags);
  if (fd >= 0) descriptors().add_real(fd);
  record("eventfd", fd);
  return fd;
}

SIMULATE(int, timerfd_create, (int clock, int flags), (clock, flags))
int simulated_timerfd_create(int clock, int flags) {
  if (clock != CLOCK_MONOTONIC || (flags & TFD_NONBLOCK) == 0) fail_run("a timer that the simulation does not know");
  const int fd = next_timerfd_create(clock, flags);
  if (fd >= 0) descriptors().add_timer(fd);
  record("timerfd_create", fd);
  return fd;
}

SIMULATE(int, timerfd_settime, (int fd, int flags, const itimerspec* time, itimerspec* before),
         (fd, flags, time, before))
int simulated_timerfd_settime(int fd, int flags, const itimerspec* time, itimerspec* before) {
  Time* const end = descriptors().timer(fd);
  if (end == nullptr || flags != TFD_TIMER_ABSTIME || duration_of(time->it_interval) != 0 || before != nullptr) {
    fail_run("a timer that the simulation does not know");
  }
  step("timerfd_settime");
  *end = duration_of(time->it_value) == 0 ? kNever : time_of(CLOCK_MONOTONIC, time->it_value);
  wake(kAnyDescriptor);
  note_activity();
  record("timerfd_settime", 0);
  return 0;
}

SIMULATE(int, pipe2, (int* ends, int flags), (ends, flags))
int simulated_pipe2(int* ends, int flags) {
  const int result = next_pipe2(ends, flags);
  if (result == 0) descriptors().add_real(ends[0]);
  if (result == 0) descriptors().add_real(ends[1]);
  record("pipe2", result == 0 ? ends[0] : result);
  return result;
}

SIMULATE(int, epoll_create1, (int flags), (flags))
int simulated_epoll_create1(int flags) {
  const int fd = next_epoll_create1(flags);
  if (fd >= 0) descriptors().add_epoll(fd);
  record("epoll_create1", fd);
  return fd;
}

SIMULATE(int, epoll_ctl, (int epoll, int operation, int fd, epoll_event* event), (epoll, operation, fd, event))
int simulated_epoll_ctl(int epoll, int operation, int fd, epoll_event* event) {
  step("epoll_ctl");
  const int result = descriptors().control_epoll(epoll, operation, fd, event);
  if (result == 0) descriptors_changed();
  record("epoll_ctl", result);
  if (result == 0) return 0;
  errno = -result;
  return -1;
}

SIMULATE(int, epoll_wait, (int epoll, epoll_event* events, int max_events, int timeout),
         (epoll, events, max_events, timeout))
int simulated_epoll_wait(int epoll, epoll_event* events, int max_events, int timeout) {
  step("epoll_wait");
  const Time deadline = deadline_in_ms(timeout);
  int ready = 0;
  while ((ready = descriptors().take_ready(epoll, events, max_events)) == 0 && now() < deadline) {
    wait_for_descriptors("epoll_wait", std::min(deadline, descriptors().next_change_of_set(epoll)));
  }
  record("epoll_wait", ready);
  return ready;
}

SIMULATE(int, poll, (pollfd * fds, nfds_t count, int timeout), (fds, count, timeout))
int simulated_poll(pollfd* fds, nfds_t count, int timeout) {
  step("poll");
  const Time deadline = deadline_in_ms(timeout);
  while (true) {
    int ready = 0;
    Time next = deadline;
    for (pollfd* each = fds; each != fds + count; ++each) {
      const int wanted = each->events | POLLERR | POLLHUP | POLLNVAL;
      each->revents = each->fd < 0 ? short{0} : static_cast<short>(descriptors().events(each->fd) & wanted);
      if (each->revents != 0) ++ready;
      if (each->fd >= 0) next = std::min(next, descriptors().next_change(each->fd));
    }
    if (ready != 0 || now() >= deadline) {
      record("poll", ready);
      return ready;
    }
    wait_for_descriptors("poll", next);
  }
}

// softverbs writes into pipes of other processes.
SIMULATE(int, open64, (const char* path, int flags, unsigned mode), (path, flags, mode))
int simulated_open64(const char* path, int flags, unsigned mode) {
  const int fd = next_open64(path, flags, mode);
  const std::string_view name(path);
  if (fd >= 0 && name.starts_with("/proc/") && name.find("/fd/") != std::string_view::npos) descriptors().add_real(fd);
  return fd;
}

namespace {

// Files of the kernel in which machines differ, and so what the plugin allocates for them. No run finds any.
bool is_of_host(std::string_view path) {
  constexpr std::string_view kBegins[] = {"/sys/", "/proc/modules", "/proc/self/cgroup", "/proc/self/status",
                                          "/proc/sys/"};
  return std::any_of(std::begin(kBegins), std::end(kBegins),
                     [path](std::string_view begin) { return path.starts_with(begin); });
}

bool is_hidden(const char* path) {
  const bool hides = is_of_host(path);
  if (hides) errno = ENOENT;
  return hides;
}

}  // namespace

SIMULATE(FILE*, fopen64, (const char* path, const char* mode), (path, mode))
FILE* simulated_fopen64(const char* path, const char* mode) {
  return is_hidden(path) ? nullptr : next_fopen64(path, mode);
}

SIMULATE(DIR*, opendir, (const char* path), (path))
DIR* simulated_opendir(const char* path) {
  return is_hidden(path) ? nullptr : next_opendir(path);
}

SIMULATE(int, access, (const char* path, int mode), (path, mode))
int simulated_access(const char* path, int mode) {
  return is_hidden(path) ? -1 : next_access(path, mode);
}

// The kernel's queue is not the simulation's.
SIMULATE(int, flock, (int fd, int operation), (fd, operation))
int simulated_flock(int fd, int operation) {
  while (next_flock(fd, operation | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK || (operation & LOCK_NB) != 0) return -1;
    poll_in_vain("flock");
  }
  return 0;
}

SIMULATE(int, fcntl64, (int fd, int command, long argument), (fd, command, argument))
int simulated_fcntl64(int fd, int command, long argument) {
  if (command == F_SETLKW || command == F_OFD_SETLKW) fail_run("fcntl that may wait for a lock in the kernel");
  if ((command == F_DUPFD || command == F_DUPFD_CLOEXEC) && descriptors().is_known(fd)) {
    fail_run("fcntl that makes a second descriptor, which the simulation does not know");
  }
  return next_fcntl64(fd, command, argument);
}

namespace {

// Returns when a call for `events` of a real descriptor does not wait in the kernel.
void wait_until_ready(const char* call, int fd, short events) {
  if ((next_fcntl64(fd, F_GETFL, 0) & O_NONBLOCK) != 0) return;
  while ((descriptors().events(fd) & (events | POLLERR | POLLHUP)) == 0) wait_for_descriptors(call, kNever);
}

}  // namespace

SIMULATE(ssize_t, read, (int fd, void* data, std::size_t bytes), (fd, data, bytes))
ssize_t simulated_read(int fd, void* data, std::size_t bytes) {
  if (!descriptors().is_known(fd)) return next_read(fd, data, bytes);
  if (descriptors().socket(fd) != Tcp::kNone) return ::recv(fd, data, bytes, 0);
  if (descriptors().timer(fd) != nullptr) fail_run("a read of a timer");
  step("read");
  wait_until_ready("read", fd, POLLIN);
  const ssize_t result = next_read(fd, data, bytes);
  const int error = errno;
  if (result > 0) descriptors_changed();
  record("read", result);
  errno = error;
  return result;
}

SIMULATE(ssize_t, write, (int fd, const void* data, std::size_t bytes), (fd, data, bytes))
ssize_t simulated_write(int fd, const void* data, std::size_t bytes) {
  if (!descriptors().is_known(fd)) return next_write(fd, data, bytes);
  if (descriptors().socket(fd) != Tcp::kNone) return ::send(fd, data, bytes, 0);
  step("write");
  wait_until_ready("write", fd, POLLOUT);
  const ssize_t result = next_write(fd, data, bytes);
  const int error = errno;
  if (result > 0) descriptors_changed();
  record("write", result);
  errno = error;
  return result;
}

SIMULATE(int, close, (int fd), (fd))
int simulated_close(int fd) {
  if (!descriptors().is_known(fd)) return next_close(fd);
  step("close");
  descriptors().remove(fd);
  const int result = next_close(fd);
  descriptors_changed();
  record("close", fd);
  return result;
}
