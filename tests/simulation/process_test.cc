// Runs of several processes.
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <set>
#include <string>
#include <thread>

#include "simulation/captured_run.h"
#include "simulation/test_sockets.h"

namespace simulation {
namespace {

using namespace std::chrono_literals;

const sockaddr_in kAddress{AF_INET, htons(12345), {htonl(INADDR_LOOPBACK)}, {}};

struct Shared {
  std::atomic<std::uint32_t> word{0};
  std::atomic<int> pid{0};
  std::atomic<int> fd{0};
};

// Memory that the processes of a run share.
Shared& make_shared_memory() {
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return *new (memory) Shared;
}

void await(const std::atomic<int>& value) {
  while (value == 0) ::sched_yield();
}

const sockaddr* address() {
  return reinterpret_cast<const sockaddr*>(&kAddress);
}

// Process 0 listens, accepts one connection and reads until its end; the others sleep and run `send` with a connection.
template <typename Send>
bool read_from_other(std::size_t process, int expected, int expected_errno, Send send) {
  const int own = ::socket(AF_INET, kStream, 0);
  if (process != 0) {
    std::this_thread::sleep_for(1s);
    ::connect(own, address(), sizeof kAddress);
    wait_for(own, POLLOUT);
    return send(own);
  }
  ::bind(own, address(), sizeof kAddress);
  ::listen(own, 1);
  wait_for(own, POLLIN);
  const int accepted = ::accept4(own, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  int read = 0;
  char byte = 0;
  ssize_t result = 0;
  for (errno = 0; (result = ::recv(accepted, &byte, 1, 0)) > 0 || errno == EAGAIN; errno = 0) {
    if (result > 0) ++read;
    if (result < 0) wait_for(accepted, POLLIN);
    if (result == 0) break;
  }
  const int error = result < 0 ? errno : 0;
  ::close(accepted);
  ::close(own);
  return read == expected && error == expected_errno;
}

TEST(Processes, Connection_CarriesBytesToTheOtherProcess) {
  std::set<std::uint64_t> hashes;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const auto job = [](std::size_t process) {
      return read_from_other(process, 1, 0, [](int fd) {
        const bool sent = ::send(fd, "x", 1, MSG_NOSIGNAL) == 1;
        ::close(fd);
        return sent;
      });
    };
    const Result first = run({.seed = seed}, 2, job);
    EXPECT_TRUE(first.passed) << seed;
    EXPECT_EQ(first.outcome.hash, run({.seed = seed, .addresses = 1}, 2, job).outcome.hash) << seed;
    hashes.insert(first.outcome.hash);
  }
  EXPECT_EQ(hashes.size(), 20U);
}

TEST(Processes, ProcessEnds_ItsSocketsAreClosed) {
  const CapturedRun captured = captured_run({}, 2, [](std::size_t process) {
    return read_from_other(process, 1, 0, [](int fd) {
      if (::send(fd, "x", 1, MSG_NOSIGNAL) == 1) ::_exit(0);
      return false;
    });
  });
  EXPECT_TRUE(captured.result.passed) << captured.text;
}

TEST(Processes, WriteToAPipeOfAnotherProcess_WakesIt) {
  Shared& shared = make_shared_memory();
  const CapturedRun captured = captured_run({}, 2, [&](std::size_t process) {
    if (process != 0) {
      await(shared.pid);
      std::this_thread::sleep_for(5s);
      char path[64];
      std::snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.pid.load(), shared.fd.load());
      const int fd = ::open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
      const bool written = ::write(fd, "x", 1) == 1;
      ::close(fd);
      return written;
    }
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return false;
    shared.fd = ends[1];
    shared.pid = ::getpid();
    note_progress();
    const bool woken = wait_for(ends[0], POLLIN) == POLLIN && now() >= 5 * kSecond;
    ::close(ends[0]);
    ::close(ends[1]);
    return woken;
  });
  EXPECT_TRUE(captured.result.passed) << captured.text;
}

TEST(Processes, FutexInSharedMemory_WakesTheOtherProcess) {
  Shared& shared = make_shared_memory();
  const CapturedRun captured = captured_run({}, 2, [&](std::size_t process) {
    if (process == 0) {
      while (shared.word == 0) ::syscall(SYS_futex, &shared.word, FUTEX_WAIT, 0, nullptr, nullptr, 0);
      return now() >= kSecond;
    }
    std::this_thread::sleep_for(1s);
    shared.word = 1;
    ::syscall(SYS_futex, &shared.word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    return true;
  });
  EXPECT_TRUE(captured.result.passed) << captured.text;
}

TEST(Processes, LockOfAFile_IsWaitedForInTheRun) {
  const std::string path = testing::TempDir() + "simulation-lock-" + std::to_string(::getpid());
  const CapturedRun captured = captured_run({}, 2, [&](std::size_t process) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (process == 1) std::this_thread::sleep_for(1s);
    const bool locked = ::flock(fd, LOCK_EX) == 0;
    if (process == 0) std::this_thread::sleep_for(10s);
    ::close(fd);
    return locked && now() >= 10 * kSecond;
  });
  ::unlink(path.c_str());
  EXPECT_TRUE(captured.result.passed) << captured.text;
}

TEST(Processes, AllWait_IsADeadlockWithNames) {
  const CapturedRun captured = captured_run({}, 2, [](std::size_t process) {
    const std::uint32_t word = 0;
    if (process == 0) ::syscall(SYS_futex, &word, FUTEX_WAIT, 0, nullptr, nullptr, 0);
    return true;
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("deadlock"), std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("process 0, thread 0 waits in futex wait"), std::string::npos) << captured.text;
}

TEST(Processes, OneFails_TheOthersAreEnded) {
  const CapturedRun captured = captured_run({}, 3, [](std::size_t process) {
    if (process == 1) return false;
    while (true) std::this_thread::sleep_for(1s);
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_LT(captured.result.outcome.ended, kSecond);
  EXPECT_NE(captured.text.find("the job of process 1 has failed"), std::string::npos) << captured.text;
  EXPECT_EQ(captured.text.find("limit of virtual time"), std::string::npos) << captured.text;
}

TEST(Processes, OneLoopsWithoutACall_FailsWithItsThread) {
  const CapturedRun captured = captured_run({}, 2, [](std::size_t process) {
    volatile bool goes_on = true;
    if (process == 1) ::kill(::getppid(), SIGALRM);  // as if two minutes had passed
    while (process == 1 && goes_on) continue;
    return true;
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("does not end its call"), std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("process 1, thread 1 runs in its begin"), std::string::npos) << captured.text;
}

TEST(Processes, PlannedDeath_EndsAProcessAtItsStepAndItsSocketsWithIt) {
  for (std::uint64_t step = 1; step < 200; step += 20) {
    Plan plan;
    plan.dies_at[1] = step;
    const CapturedRun captured = captured_run(plan, 2, [](std::size_t process) {
      if (process == 1) {
        const int own = ::socket(AF_INET, kStream, 0);
        ::bind(own, address(), sizeof kAddress);
        ::listen(own, 1);
        while (true) std::this_thread::sleep_for(1ms);
      }
      while (death_of(1) == kNever) ::sched_yield();
      const int own = ::socket(AF_INET, kStream, 0);
      ::connect(own, address(), sizeof kAddress);
      wait_for(own, POLLOUT);
      int error = 0;
      socklen_t bytes = sizeof error;
      ::getsockopt(own, SOL_SOCKET, SO_ERROR, &error, &bytes);
      ::close(own);
      return error == ECONNREFUSED;
    });
    EXPECT_TRUE(captured.result.passed) << captured.text;
  }
}

TEST(Processes, EndLikeADeathThatWasNotPlanned_Fails) {
  const CapturedRun captured = captured_run({}, 2, [](std::size_t process) {
    if (process == 1) ::_exit(kExitOfDeath);
    return true;
  });
  EXPECT_FALSE(captured.result.passed);
}

}  // namespace
}  // namespace simulation
