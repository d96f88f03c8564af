// The descriptors of a simulated process on which somebody may wait. Each has a real descriptor, so that its number and
// its life are the kernel's. Sockets, sets of epoll and timers are in memory; event counters and pipes are real,
// because only simulated threads write to them.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <map>

#include "simulation/scheduler.h"
#include "simulation/tcp.h"

namespace simulation {

class Descriptors {
 public:
  void add_socket(int fd, Tcp::Id socket) { table_.at(index(fd)) = {Kind::kSocket, socket}; }
  void add_epoll(int fd) { table_.at(index(fd)) = {Kind::kEpoll}; }
  void add_timer(int fd) { table_.at(index(fd)) = {Kind::kTimer}; }
  // An event counter or a pipe.
  void add_real(int fd) { table_.at(index(fd)) = {Kind::kReal}; }
  // Of a timer, when it ends; kNever: it is not set.
  Time* timer(int fd) { return kind(fd) == Kind::kTimer ? &table_[index(fd)].timer_end : nullptr; }
  // Before it is closed. The sets of epoll forget it.
  void remove(int fd);

  std::size_t count() const;
  bool is_known(int fd) const { return kind(fd) != Kind::kOther; }
  // Tcp::kNone: it is no simulated socket.
  Tcp::Id socket(int fd) const { return is_known(fd) ? table_[index(fd)].socket : Tcp::kNone; }

  // As poll reports them, all of them.
  short events(int fd) const;
  Time next_change(int fd) const;

  int control_epoll(int epoll, int operation, int fd, const epoll_event* event);
  // Those that are ready, in an order that the seed chooses.
  int take_ready(int epoll, epoll_event* events, int max_events);
  Time next_change_of_set(int epoll) const;

 private:
  enum class Kind { kOther, kSocket, kEpoll, kTimer, kReal };
  struct Watch {
    epoll_event event;
    bool armed;
  };
  struct Descriptor {
    Kind kind = Kind::kOther;
    Tcp::Id socket = Tcp::kNone;
    std::map<int, Watch> watched = {};
    Time timer_end = kNever;
  };
  static constexpr std::size_t kMax = 1024;

  static std::size_t index(int fd) { return static_cast<std::size_t>(fd); }
  Kind kind(int fd) const { return fd < 0 || index(fd) >= kMax ? Kind::kOther : table_[index(fd)].kind; }

  std::array<Descriptor, kMax> table_;
};

Descriptors& descriptors();

// All threads that wait for descriptors look again when something has happened to one.
Wake wait_for_descriptors(const char* call, Time deadline);
void descriptors_changed();

}  // namespace simulation
