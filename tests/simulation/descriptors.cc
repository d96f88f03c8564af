#include "simulation/descriptors.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "support/next_function.h"

namespace simulation {
namespace {

constexpr std::uint32_t kAlwaysReported = EPOLLERR | EPOLLHUP;

// EPOLLIN and the others have the values of POLLIN and the others.
static_assert(EPOLLIN == POLLIN && EPOLLOUT == POLLOUT && EPOLLERR == POLLERR && EPOLLHUP == POLLHUP);
static_assert(EPOLLRDHUP == POLLRDHUP);

// Found before main: a dlsym later could wait for the lock of the loader.
const auto original_poll = verbatim::test::next_function<int (*)(pollfd*, nfds_t, int)>("poll");

}  // namespace

Descriptors& descriptors() {
  static Descriptors only;
  return only;
}

Wake wait_for_descriptors(const char* call, Time deadline) {
  return wait(call, kAnyDescriptor, deadline);
}

void descriptors_changed() {
  wake(kAnyDescriptor);
  note_progress();
}

void Descriptors::remove(int fd) {
  const Tcp::Id closed = socket(fd);
  table_[index(fd)] = {};
  const auto has_it = [&](const Descriptor& other) { return other.socket == closed; };
  if (closed != Tcp::kNone && std::none_of(table_.begin(), table_.end(), has_it)) tcp().close(closed);
  for (Descriptor& other : table_) other.watched.erase(fd);
}

std::size_t Descriptors::count() const {
  return static_cast<std::size_t>(
      std::count_if(table_.begin(), table_.end(), [](const Descriptor& each) { return each.kind != Kind::kOther; }));
}

short Descriptors::events(int fd) const {
  if (kind(fd) == Kind::kSocket) return tcp().events(socket(fd));
  if (kind(fd) == Kind::kEpoll) fail_run("a wait for a set of epoll, which is in memory");
  if (kind(fd) == Kind::kTimer) return table_[index(fd)].timer_end <= now() ? POLLIN : short{0};
  pollfd real{fd, POLLIN | POLLOUT | POLLRDHUP, 0};
  static_cast<void>(original_poll(&real, 1, 0));
  return real.revents;
}

Time Descriptors::next_change(int fd) const {
  if (kind(fd) == Kind::kTimer) return table_[index(fd)].timer_end;
  return kind(fd) == Kind::kSocket ? tcp().next_change(socket(fd)) : kNever;
}

int Descriptors::control_epoll(int epoll, int operation, int fd, const epoll_event* event) {
  if (kind(epoll) != Kind::kEpoll) return -EINVAL;
  std::map<int, Watch>& watched = table_[index(epoll)].watched;
  if (!is_known(fd)) fail_run("epoll_ctl with a descriptor that the simulation does not know");
  const bool is_watched = watched.contains(fd);
  if (operation == EPOLL_CTL_ADD && is_watched) return -EEXIST;
  if (operation != EPOLL_CTL_ADD && !is_watched) return -ENOENT;
  if (operation == EPOLL_CTL_DEL) {
    watched.erase(fd);
  } else {
    watched[fd] = {*event, true};
  }
  return 0;
}

int Descriptors::take_ready(int epoll, epoll_event* events, int max_events) {
  struct Ready {
    Watch* watch;
    std::uint32_t events;
  };
  std::vector<Ready> ready;
  for (auto& [fd, watch] : table_[index(epoll)].watched) {
    const auto wanted = watch.event.events | kAlwaysReported;
    const std::uint32_t found = static_cast<std::uint16_t>(this->events(fd)) & wanted;
    if (watch.armed && found != 0) ready.push_back({&watch, found});
  }
  int taken = 0;
  for (; taken < max_events && !ready.empty(); ++taken) {
    const auto chosen = ready.begin() + static_cast<std::ptrdiff_t>(random_below(ready.size()));
    events[taken] = chosen->watch->event;
    events[taken].events = chosen->events;
    if ((chosen->watch->event.events & EPOLLONESHOT) != 0) chosen->watch->armed = false;
    ready.erase(chosen);
  }
  return taken;
}

Time Descriptors::next_change_of_set(int epoll) const {
  Time next = kNever;
  for (const auto& [fd, watch] : table_[index(epoll)].watched) {
    if (watch.armed) next = std::min(next, next_change(fd));
  }
  return next;
}

}  // namespace simulation
