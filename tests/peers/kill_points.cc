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

constexpr const char* kMark = "kill point: ";

struct PointCounter {
  int signal;
  long nth;
  std::string name;
  long points = 0;
  KillPoint reached = {};
  std::map<std::string, int> calls = {};  // number of calls so far, by name
  std::string last_verb = {};
};
thread_local PointCounter* g_counter = nullptr;

void pass_point(const std::string& name) {
  PointCounter& counter = *g_counter;
  ++counter.points;
  if (counter.nth != 0 ? counter.points != counter.nth : name != counter.name) return;
  const std::string line =
      kMark + std::to_string(counter.reached.sent) + " " + std::to_string(counter.reached.posted) + " " + name + "\n";
  static_cast<void>(!::write(STDOUT_FILENO, line.data(), line.size()));
  ::kill(::getpid(), counter.signal);
  while (counter.signal == SIGKILL) ::pause();
}

std::string numbered(const char* when, const char* call, int number) {
  return std::string(when).append(call).append(" ").append(std::to_string(number));
}

void after(const char* call) {
  const int error = errno;
  pass_point(numbered("after ", call, ++g_counter->calls[call]));
  errno = error;
}

// After ibv_post_send the device transfers data, so the first poll after it is a kill point too. Consecutive
// ibv_post_recv calls are one kill point.
void before_verb(const char* verb) {
  if (g_counter == nullptr) return;
  PointCounter& counter = *g_counter;
  const bool is_repeated = counter.last_verb == verb;
  const bool posted = counter.last_verb == "ibv_post_send";
  counter.last_verb = verb;
  if (posted) {
    ++counter.reached.posted;
    after("ibv_post_send");
  }
  const bool polls = std::strcmp(verb, "ibv_poll_cq") == 0;
  if (polls || (is_repeated && std::strcmp(verb, "ibv_post_recv") == 0)) return;
  if (std::strcmp(verb, "ibv_post_send") == 0) return pass_point(numbered("before ", verb, counter.reached.posted + 1));
  pass_point(numbered("before ", verb, ++counter.calls[verb]));
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
  const std::size_t begin = output.find(kMark);
  if (begin == std::string::npos) return std::nullopt;
  KillPoint found;
  int length = 0;
  const std::string line =
      output.substr(begin + std::strlen(kMark), output.find('\n', begin) - begin - std::strlen(kMark));
  if (std::sscanf(line.c_str(), "%d %d %n", &found.sent, &found.posted, &length) != 2) return std::nullopt;
  found.name = line.substr(static_cast<std::size_t>(length));
  return found;
}

}  // namespace conformance

// These functions replace those of the C library. They are defined under other C++ names, because the headers of the C
// library declare them with other specifiers.
#define KILL_POINT(result, symbol, did_something, parameters, arguments)                                           \
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

KILL_POINT(int, socket, returned >= 0, (int domain, int type, int protocol), (domain, type, protocol))
KILL_POINT(int, setsockopt, returned == 0, (int fd, int level, int name, const void* value, socklen_t bytes),
           (fd, level, name, value, bytes))
KILL_POINT(int, bind, returned == 0, (int fd, const sockaddr* address, socklen_t bytes), (fd, address, bytes))
KILL_POINT(int, connect, returned == 0 || errno == EINPROGRESS, (int fd, const sockaddr* address, socklen_t bytes),
           (fd, address, bytes))
KILL_POINT(int, poll, returned > 0, (pollfd * fds, nfds_t count, int timeout), (fds, count, timeout))
KILL_POINT(int, getsockopt, returned == 0, (int fd, int level, int name, void* value, socklen_t* bytes),
           (fd, level, name, value, bytes))
KILL_POINT(int, accept4, returned >= 0, (int fd, sockaddr* address, socklen_t* bytes, int flags),
           (fd, address, bytes, flags))
KILL_POINT(int, getpeername, returned == 0, (int fd, sockaddr* address, socklen_t* bytes), (fd, address, bytes))
KILL_POINT(ssize_t, recv, returned > 0, (int fd, void* data, std::size_t bytes, int flags), (fd, data, bytes, flags))
KILL_POINT(int, epoll_ctl, returned == 0, (int epoll, int operation, int fd, epoll_event* event),
           (epoll, operation, fd, event))

using Send = ssize_t (*)(int fd, const void* data, std::size_t bytes, int flags);
static Send next_send = nullptr;
extern "C" __attribute__((visibility("default"))) ssize_t interposed_send(int fd, const void* data, std::size_t bytes,
                                                                          int flags) __asm__("send");
// Sends each message in two halves, so that a kill point lies in the middle.
ssize_t interposed_send(int fd, const void* data, std::size_t bytes, int flags) {
  if (next_send == nullptr) next_send = verbatim::test::next_function<Send>("send");
  using conformance::g_counter;
  if (g_counter == nullptr) return next_send(fd, data, bytes, flags);
  static bool is_second_half = false;
  const int number = g_counter->reached.sent + 1;
  if (!is_second_half) conformance::pass_point(conformance::numbered("before ", "send", number));
  const ssize_t sent = next_send(fd, data, is_second_half ? bytes : (bytes + 1) / 2, flags);
  if (sent <= 0) return sent;
  if (!is_second_half) {
    conformance::pass_point(conformance::numbered("in the middle of ", "send", number));
  } else {
    g_counter->reached.sent = number;
    conformance::after("send");
  }
  is_second_half = !is_second_half;
  return sent;
}
__attribute__((constructor)) static void find_send() {
  next_send = verbatim::test::next_function<Send>("send");
}
