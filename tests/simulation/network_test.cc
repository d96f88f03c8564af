// Descriptors and TCP of a simulated run.
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>

#include "simulation/captured_run.h"
#include "simulation/clock.h"
#include "simulation/faults.h"
#include "simulation/tcp.h"
#include "simulation/test_sockets.h"

namespace simulation {
namespace {

using namespace std::chrono_literals;

// A listener, and a connection of which both ends are known; `defer_s`: TCP_DEFER_ACCEPT.
struct Pair {
  explicit Pair(int defer_s = 0) {
    ::setsockopt(listener, IPPROTO_TCP, TCP_DEFER_ACCEPT, &defer_s, sizeof defer_s);
    sockaddr_in address{AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {}};
    socklen_t bytes = sizeof address;
    ::bind(listener, reinterpret_cast<const sockaddr*>(&address), bytes);
    ::listen(listener, 1);
    ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes);
    ::connect(one, reinterpret_cast<const sockaddr*>(&address), bytes);
    wait_for(one, POLLOUT);
    if (defer_s == 0) accept();
  }
  ~Pair() {
    for (const int fd : {listener, one, other}) {
      if (fd >= 0) ::close(fd);
    }
  }
  void accept() {
    wait_for(listener, POLLIN);
    other = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  }

  int listener = ::socket(AF_INET, kStream, 0);
  int one = ::socket(AF_INET, kStream, 0);
  int other = -1;
};

std::string receive_all(int fd) {
  std::string all;
  char part[1000];
  while (true) {
    wait_for(fd, POLLIN);
    const ssize_t count = ::recv(fd, part, sizeof part, 0);
    if (count == 0) return all;
    if (count > 0) all.append(part, static_cast<std::size_t>(count));
    if (count < 0 && errno != EAGAIN) return "failed";
  }
}

bool receive_one(int fd) {
  char byte = 0;
  wait_for(fd, POLLIN);
  return ::recv(fd, &byte, 1, 0) == 1;
}

bool send_all(int fd, const std::string& text) {
  for (std::size_t sent = 0; sent < text.size();) {
    wait_for(fd, POLLOUT);
    const ssize_t count = ::send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN) return false;
    if (count > 0) sent += static_cast<std::size_t>(count);
  }
  return true;
}

TEST(Network, Bytes_ArriveInOrderAndInPieces) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Result result = run({.seed = seed}, [] {
      Pair pair;
      std::string text(100'000, ' ');
      for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i / 7);
      std::thread sender([&] {
        send_all(pair.one, text);
        ::shutdown(pair.one, SHUT_WR);
      });
      const bool is_right = receive_all(pair.other) == text;
      sender.join();
      return is_right && send_all(pair.other, "back") && wait_for(pair.one, POLLIN) == POLLIN;
    });
    EXPECT_TRUE(result.passed) << seed;
  }
}

TEST(Network, ConnectWithoutListener_IsRefused) {
  const Result result = run({}, [] {
    const int fd = ::socket(AF_INET, kStream, 0);
    const sockaddr_in address{AF_INET, htons(1), {htonl(INADDR_LOOPBACK)}, {}};
    const bool waits = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == -1 &&
                       errno == EINPROGRESS && wait_for(fd, POLLOUT, 0) == 0;
    wait_for(fd, POLLOUT);
    int error = 0;
    socklen_t bytes = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    ::close(fd);
    return waits && error == ECONNREFUSED;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, Close_PeerReadsTheRestAndTheEnd) {
  const Result result = run({}, [] {
    Pair pair;
    const bool sent = send_all(pair.one, "last words");
    ::close(pair.one);
    pair.one = -1;
    return sent && receive_all(pair.other) == "last words" && (wait_for(pair.other, POLLRDHUP) & POLLRDHUP) != 0;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, CloseWithUnreadBytes_PeerIsReset) {
  const Result result = run({}, [] {
    Pair pair;
    const bool sent = send_all(pair.other, "not read");
    wait_for(pair.one, POLLIN);
    ::close(pair.one);
    pair.one = -1;
    char byte = 0;
    const bool is_reset = (wait_for(pair.other, POLLIN) & POLLERR) != 0;
    return sent && is_reset && ::recv(pair.other, &byte, 1, 0) == -1 && errno == ECONNRESET &&
           ::recv(pair.other, &byte, 1, 0) == 0 && ::send(pair.other, "x", 1, MSG_NOSIGNAL) == -1 && errno == EPIPE;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, ListenerCloses_WhoWaitsInItsBacklogIsReset) {
  const Result result = run({}, [] {
    Pair pair(1000);
    ::close(pair.listener);
    pair.listener = -1;
    return (wait_for(pair.one, POLLIN) & POLLERR) != 0;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, DeferredAccept_WaitsForTheFirstBytesOrItsTime) {
  const Result result = run({}, [] {
    Pair first(10);
    const bool waits = wait_for(first.listener, POLLIN, 5000) == 0;
    const bool sent = send_all(first.one, "hello");
    first.accept();
    const bool early = now() < 6 * kSecond;
    Pair second(10);
    second.accept();
    return waits && sent && early && first.other >= 0 && second.other >= 0 && now() >= 15 * kSecond;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, Epoll_ReportsWhatIsArmed) {
  const Result result = run({}, [] {
    const int epoll = ::epoll_create1(EPOLL_CLOEXEC);
    const int counter = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLONESHOT;
    event.data.u64 = 77;
    ::epoll_ctl(epoll, EPOLL_CTL_ADD, counter, &event);
    const bool twice = ::epoll_ctl(epoll, EPOLL_CTL_ADD, counter, &event) == -1 && errno == EEXIST;
    std::thread writer([&] {
      std::this_thread::sleep_for(2s);
      const std::uint64_t one = 1;
      static_cast<void>(!::write(counter, &one, sizeof one));
    });
    epoll_event found{};
    const bool nothing = ::epoll_wait(epoll, &found, 1, 1000) == 0 && now() >= kSecond;
    const bool woken = ::epoll_wait(epoll, &found, 1, -1) == 1 && found.data.u64 == 77 && now() < 3 * kSecond;
    const bool disarmed = ::epoll_wait(epoll, &found, 1, 0) == 0;
    ::epoll_ctl(epoll, EPOLL_CTL_MOD, counter, &event);
    const bool armed = ::epoll_wait(epoll, &found, 1, 0) == 1;
    writer.join();
    ::close(counter);
    ::close(epoll);
    return twice && nothing && woken && disarmed && armed;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, Timer_EndsWhenItWasSetLast) {
  const Result result = run({}, [] {
    const int epoll = ::epoll_create1(EPOLL_CLOEXEC);
    const int timer = ::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    epoll_event event{};
    event.events = EPOLLIN;
    ::epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &event);
    const auto set = [&](Time end) {
      const itimerspec time{{}, to_timespec(end == 0 ? 0 : kBeginOfOthers + end)};
      return ::timerfd_settime(timer, TFD_TIMER_ABSTIME, &time, nullptr) == 0;
    };
    epoll_event found{};
    const auto waits = [&](int ms) { return ::epoll_wait(epoll, &found, 1, ms) == 1; };
    const bool nothing = !waits(1000);
    std::thread setter([&] {
      std::this_thread::sleep_for(2s);
      set(5 * kSecond);
    });
    const bool at_nine = set(9 * kSecond);
    const bool at_five = waits(-1) && now() >= 5 * kSecond && now() < 6 * kSecond;
    const bool off = waits(0) && set(7 * kSecond) && set(0) && !waits(3000);
    const bool over = set(1) && waits(-1) && now() < 10 * kSecond;
    setter.join();
    ::close(timer);
    ::close(epoll);
    return nothing && at_nine && at_five && off && over;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, ReadOfAnEmptyPipe_WaitsForTheWriter) {
  const Result result = run({}, [] {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return false;
    std::thread writer([&] {
      std::this_thread::sleep_for(3s);
      static_cast<void>(!::write(ends[1], "x", 1));
    });
    char byte = 0;
    const bool is_read = ::read(ends[0], &byte, 1) == 1 && byte == 'x' && now() >= 3 * kSecond;
    writer.join();
    ::close(ends[0]);
    ::close(ends[1]);
    return is_read;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, SocketInThePlaceOfAnother_HasItsNumberAndItsPeer) {
  const Result result = run({}, [] {
    Pair replaced;
    Pair pair;
    const bool moved = ::dup3(pair.one, replaced.one, O_CLOEXEC) == replaced.one;
    ::close(pair.one);
    pair.one = -1;
    const bool ended = receive_all(replaced.other).empty();
    const bool written = ::write(replaced.one, "x", 1) == 1;
    int unacknowledged = 0;
    ::ioctl(replaced.one, SIOCOUTQ, &unacknowledged);
    char byte = 0;
    wait_for(pair.other, POLLIN);
    const bool is_read = ::read(pair.other, &byte, 1) == 1 && byte == 'x';
    int left = 1;
    ::ioctl(replaced.one, SIOCOUTQ, &left);
    return moved && ended && written && unacknowledged == 1 && is_read && left == 0;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, PollOfASetOfEpoll_EndsTheRun) {
  const CapturedRun captured = captured_run({}, [] { return wait_for(::epoll_create1(EPOLL_CLOEXEC), POLLIN) == 0; });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("a wait for a set of epoll"), std::string::npos) << captured.text;
}

TEST(Network, WriteOfSeveralPiecesToASocket_EndsTheRun) {
  const CapturedRun captured = captured_run({}, [] {
    char byte = 0;
    const iovec piece{&byte, 1};
    return ::writev(::socket(AF_INET, kStream, 0), &piece, 1) == 1;
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("writev was called"), std::string::npos) << captured.text;
}

TEST(Network, SocketThatIsLeft_IsALeak) {
  const CapturedRun captured = captured_run({}, [] { return ::socket(AF_INET, kStream, 0) >= 0; });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("leak: 1 sockets"), std::string::npos) << captured.text;
}

// What the first connection of the run meets.
void plan_break(Time after, bool resets) {
  TcpFaults faults;
  faults.add(TcpFaults::Break{.number = 1, .after = after, .resets = resets});
  plan_tcp_faults(faults);
}

void plan_outage(Time begin, Time end, bool refuses) {
  TcpFaults faults;
  faults.add(TcpFaults::Outage{.process = 0, .interface = 0, .begin = begin, .end = end, .refuses = refuses});
  plan_tcp_faults(faults);
}

TEST(Network, PlannedReset_ComesToBothEndsAtItsTime) {
  plan_break(kSecond, true);
  const Result result = run({}, [] {
    Pair pair;
    bool is_right = send_all(pair.one, "x") && receive_one(pair.other);
    for (const int fd : {pair.one, pair.other}) {
      is_right = is_right && (wait_for(fd, POLLERR) & POLLERR) != 0 && now() >= kSecond && now() < 2 * kSecond;
      char byte = 0;
      is_right = is_right && ::recv(fd, &byte, 1, 0) < 0 && errno == ECONNRESET;
    }
    return is_right;
  });
  EXPECT_TRUE(result.passed);
  EXPECT_EQ(fault_counts().happened[static_cast<std::size_t>(Fault::kReset)], 2U);
}

TEST(Network, ConnectionThatIsNotAnswered_TimesOut) {
  plan_break(kSecond, false);
  const Result result = run({}, [] {
    Pair pair;
    const int timeout_ms = 5000;
    ::setsockopt(pair.one, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
    bool is_right = send_all(pair.one, "x") && receive_one(pair.other);
    std::this_thread::sleep_for(2s);
    is_right = is_right && send_all(pair.one, "y") && wait_for(pair.other, POLLIN, 1000) == 0;
    int unacknowledged = 0;
    ::ioctl(pair.one, SIOCOUTQ, &unacknowledged);
    is_right = is_right && unacknowledged == 1 && (wait_for(pair.one, POLLERR) & POLLERR) != 0;
    int error = 0;
    socklen_t bytes = sizeof error;
    ::getsockopt(pair.one, SOL_SOCKET, SO_ERROR, &error, &bytes);
    return is_right && error == ETIMEDOUT && now() >= 6 * kSecond;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, BytesDuringAnOutage_ArriveWhenItHasEnded) {
  plan_outage(kSecond, 10 * kSecond, false);
  const Result result = run({}, [] {
    Pair pair;
    std::this_thread::sleep_for(2s);
    return send_all(pair.one, "x") && receive_one(pair.other) && now() >= 10 * kSecond;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Network, ConnectWhileItIsRefused_SucceedsAfterwards) {
  plan_outage(0, kSecond, true);
  const Result result = run({}, [] {
    Pair refused(1);
    int error = 0;
    socklen_t bytes = sizeof error;
    ::getsockopt(refused.one, SOL_SOCKET, SO_ERROR, &error, &bytes);
    std::this_thread::sleep_for(1s);
    Pair pair;
    return error == ECONNREFUSED && send_all(pair.one, "x") && receive_one(pair.other);
  });
  EXPECT_TRUE(result.passed);
}

}  // namespace
}  // namespace simulation
