#include "kill_points.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>

#include "lifecycle/process_resources.h"
#include "support/next_function.h"

namespace conformance {
namespace {

constexpr const char* kMark = "ended here: ";

struct PointCounter {
  int signal;
  long nth;
  std::string name;
  long places = 0;
  KillPoint reached = {};
  std::map<std::string, int> calls = {};  // of each name so far
  std::string last_verb = {};
};
thread_local PointCounter* g_counter = nullptr;

void pass_point(const std::string& place) {
  PointCounter& life = *g_counter;
  ++life.places;
  if (life.nth != 0 ? life.places != life.nth : place != life.name) return;
  const std::string line =
      kMark + std::to_string(life.reached.sent) + " " + std::to_string(life.reached.posted) + " " + place + "\n";
  static_cast<void>(!::write(STDOUT_FILENO, line.data(), line.size()));
  ::kill(::getpid(), life.signal);
  while (life.signal == SIGKILL) ::pause();
}

std::string numbered(const char* when, const char* call, int number) {
  return std::string(when).append(call).append(" ").append(std::to_string(number));
}

void after(const char* call) {
  const int error = errno;
  pass_point(numbered("after ", call, ++g_counter->calls[call]));
  errno = error;
}

// Data moves behind what a call of ibv_post_send has begun: the first look for its completion is a place, too. That
// many receives are posted one after the other changes nothing.
void before_verb(const char* verb) {
  if (g_counter == nullptr) return;
  PointCounter& life = *g_counter;
  const bool again = life.last_verb == verb;
  const bool posted = life.last_verb == "ibv_post_send";
  life.last_verb = verb;
  if (posted) {
    ++life.reached.posted;
    after("ibv_post_send");
  }
  const bool polls = std::strcmp(verb, "ibv_poll_cq") == 0;
  if (polls || (again && std::strcmp(verb, "ibv_post_recv") == 0)) return;
  if (std::strcmp(verb, "ibv_post_send") == 0) return pass_point(numbered("before ", verb, life.reached.posted + 1));
  pass_point(numbered("before ", verb, ++life.calls[verb]));
}

}  // namespace

void signal_at(int signal, long nth, const std::string& name) {
  g_counter = new PointCounter{.signal = signal, .nth = nth, .name = name};
  watch_verbs(before_verb);
  pass_point("at the start");
}

void stop_counting() {
  delete g_counter;
  g_counter = nullptr;
}

std::optional<KillPoint> parse_kill_point(const std::string& output) {
  const std::size_t mark = output.find(kMark);
  if (mark == std::string::npos) return std::nullopt;
  KillPoint found;
  int length = 0;
  const std::string line =
      output.substr(mark + std::strlen(kMark), output.find('\n', mark) - mark - std::strlen(kMark));
  if (std::sscanf(line.c_str(), "%d %d %n", &found.sent, &found.posted, &length) != 2) return std::nullopt;
  found.place = line.substr(static_cast<std::size_t>(length));
  return found;
}

}  // namespace conformance

// These stand before the C library's. Declared under names of our own, since its headers declare them with other
// specifiers.
#define PLACE(result, symbol, did_something, parameters, arguments)                                                \
  static result(*next_##symbol) parameters = nullptr;                                                              \
  extern "C" __attribute__((visibility("default"))) result interposed_##symbol parameters __asm__(#symbol);        \
  result interposed_##symbol parameters {                                                                          \
    if (next_##symbol == nullptr) next_##symbol = verbatim::test::next_function<decltype(next_##symbol)>(#symbol); \
    const result returned = next_##symbol arguments;                                                               \
    if (conformance::g_counter != nullptr && (did_something)) conformance::after(#symbol);                         \
    return returned;                                                                                               \
  }                                                                                                                \
  __attribute__((constructor)) static void find_##symbol() {                                                       \
    next_##symbol = verbatim::test::next_function<decltype(next_##symbol)>(#symbol);                               \
  }

PLACE(int, socket, returned >= 0, (int domain, int type, int protocol), (domain, type, protocol))
PLACE(int, setsockopt, returned == 0, (int fd, int level, int name, const void* value, socklen_t bytes),
      (fd, level, name, value, bytes))
PLACE(int, bind, returned == 0, (int fd, const sockaddr* address, socklen_t bytes), (fd, address, bytes))
PLACE(int, connect, returned == 0 || errno == EINPROGRESS, (int fd, const sockaddr* address, socklen_t bytes),
      (fd, address, bytes))
PLACE(int, poll, returned > 0, (pollfd * fds, nfds_t count, int timeout), (fds, count, timeout))
PLACE(int, getsockopt, returned == 0, (int fd, int level, int name, void* value, socklen_t* bytes),
      (fd, level, name, value, bytes))
PLACE(int, accept4, returned >= 0, (int fd, sockaddr* address, socklen_t* bytes, int flags),
      (fd, address, bytes, flags))
PLACE(int, getpeername, returned == 0, (int fd, sockaddr* address, socklen_t* bytes), (fd, address, bytes))
PLACE(ssize_t, recv, returned > 0, (int fd, void* data, std::size_t bytes, int flags), (fd, data, bytes, flags))
PLACE(int, epoll_ctl, returned == 0, (int epoll, int operation, int fd, epoll_event* event),
      (epoll, operation, fd, event))

using Send = ssize_t (*)(int fd, const void* data, std::size_t bytes, int flags);
static Send next_send = nullptr;
extern "C" __attribute__((visibility("default"))) ssize_t interposed_send(int fd, const void* data, std::size_t bytes,
                                                                          int flags) __asm__("send");
// A message goes out in two halves.
ssize_t interposed_send(int fd, const void* data, std::size_t bytes, int flags) {
  if (next_send == nullptr) next_send = verbatim::test::next_function<Send>("send");
  using conformance::g_counter;
  if (g_counter == nullptr) return next_send(fd, data, bytes, flags);
  static bool in_the_middle = false;
  const int number = g_counter->reached.sent + 1;
  if (!in_the_middle) conformance::pass_point(conformance::numbered("before ", "send", number));
  const ssize_t sent = next_send(fd, data, in_the_middle ? bytes : (bytes + 1) / 2, flags);
  if (sent <= 0) return sent;
  if (!in_the_middle) {
    conformance::pass_point(conformance::numbered("in the middle of ", "send", number));
  } else {
    g_counter->reached.sent = number;
    conformance::after("send");
  }
  in_the_middle = !in_the_middle;
  return sent;
}
__attribute__((constructor)) static void find_send() {
  next_send = verbatim::test::next_function<Send>("send");
}
