#include "runtime/worker.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <utility>

#include "base/clock.h"
#include "support/wait.h"

namespace verbatim {
namespace {

using test::kPatience;

constexpr std::uint64_t kHourNs = 3'600 * kNanosecondsPerSecond;

// The pieces of a worker's work, in order. Waits for each to be done; with none left the worker has none.
class Pieces {
 public:
  std::future<void> add(std::function<std::uint64_t()> piece) {
    const MutexLock lock(mutex_);
    return pieces_.emplace_back(std::move(piece)).done.get_future();
  }
  std::uint64_t do_next() {
    Piece next;
    {
      const MutexLock lock(mutex_);
      if (pieces_.empty()) return kNever;
      next = std::move(pieces_.front());
      pieces_.pop_front();
    }
    const std::uint64_t due_ns = next.work();
    next.done.set_value();
    return due_ns;
  }

 private:
  struct Piece {
    Piece() = default;
    explicit Piece(std::function<std::uint64_t()> piece) : work(std::move(piece)) {}
    std::function<std::uint64_t()> work;
    std::promise<void> done;
  };
  Mutex mutex_;
  std::deque<Piece> pieces_ VERBATIM_GUARDED_BY(mutex_);
};

class WorkerTest : public testing::Test {
 protected:
  static bool is_done(const std::future<void>& piece) { return piece.wait_for(kPatience) == std::future_status::ready; }

  Pieces pieces_;
  Worker worker_{"test-worker", [this] { return pieces_.do_next(); }};
};

// An ended thread stays in the kernel's list for a moment.
bool has_ended(pid_t thread) {
  test::Wait wait(kPatience);
  while (::tgkill(::getpid(), thread, 0) == 0) {
    if (wait.is_over()) return false;
    wait.rest();
  }
  return errno == ESRCH;
}

TEST_F(WorkerTest, PieceIsLast_ThreadEndsAndIsMadeAgain) {
  pid_t first = 0;
  pid_t second = 0;
  const std::future<void> one = pieces_.add([&] { return first = ::gettid(), kNever; });
  ASSERT_TRUE(worker_.wake());
  ASSERT_TRUE(is_done(one));
  EXPECT_TRUE(has_ended(first));
  const std::future<void> two = pieces_.add([&] { return second = ::gettid(), kNever; });
  ASSERT_TRUE(worker_.wake());
  ASSERT_TRUE(is_done(two));
  EXPECT_NE(second, ::gettid());
}

TEST_F(WorkerTest, PieceIsDueAtOnce_SameThreadDoesIt) {
  std::array<pid_t, 2> threads{};
  const std::future<void> one = pieces_.add([&] { return threads[0] = ::gettid(), std::uint64_t{0}; });
  const std::future<void> two = pieces_.add([&] { return threads[1] = ::gettid(), kNever; });
  ASSERT_TRUE(worker_.wake());
  ASSERT_TRUE(is_done(one));
  ASSERT_TRUE(is_done(two));
  EXPECT_EQ(threads[0], threads[1]);
}

TEST_F(WorkerTest, PieceIsDueLater_IsDoneThenAndNotBefore) {
  std::uint64_t due_ns = 0;
  std::uint64_t done_ns = 0;
  const std::future<void> one = pieces_.add([&] { return due_ns = monotonic_ns() + 20 * kNanosecondsPerMillisecond; });
  const std::future<void> two = pieces_.add([&] { return done_ns = monotonic_ns(), kNever; });
  ASSERT_TRUE(worker_.wake());
  ASSERT_TRUE(is_done(one));
  ASSERT_TRUE(is_done(two));
  EXPECT_GE(done_ns, due_ns);
}

TEST_F(WorkerTest, WokenBeforePieceIsDue_DoesItNow) {
  const std::future<void> one = pieces_.add([] { return monotonic_ns() + kHourNs; });
  const std::future<void> two = pieces_.add([] { return kNever; });
  ASSERT_TRUE(worker_.wake());
  ASSERT_TRUE(is_done(one));
  ASSERT_TRUE(worker_.wake());
  ASSERT_TRUE(is_done(two));
}

// As with a device that hangs: what is requested meanwhile must not be forgotten when the piece says that it was the
// last.
TEST_F(WorkerTest, WokenWhilePieceIsDone_DoesTheNext) {
  std::promise<void> begun;
  std::promise<void> requested;
  const std::future<void> one = pieces_.add([&] {
    begun.set_value();
    requested.get_future().wait();
    return kNever;
  });
  ASSERT_TRUE(worker_.wake());
  begun.get_future().wait();
  const std::future<void> two = pieces_.add([] { return kNever; });
  ASSERT_TRUE(worker_.wake());
  requested.set_value();
  ASSERT_TRUE(is_done(one));
  ASSERT_TRUE(is_done(two));
}

TEST_F(WorkerTest, Thread_HasItsNameAndNoSignals) {
  std::array<char, 16> name{};
  sigset_t blocked;
  const std::future<void> piece = pieces_.add([&] {
    pthread_getname_np(pthread_self(), name.data(), name.size());
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    return kNever;
  });
  ASSERT_TRUE(worker_.wake());
  ASSERT_TRUE(is_done(piece));
  EXPECT_STREQ(name.data(), "test-worker");
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD, SIGALRM}) EXPECT_TRUE(sigismember(&blocked, signal));
  sigset_t own;
  pthread_sigmask(SIG_BLOCK, nullptr, &own);
  EXPECT_FALSE(sigismember(&own, SIGUSR1));
}

TEST(Worker, DestroyedBeforePieceIsDue_DoesNotWait) {
  Pieces pieces;
  Worker worker("test-worker", [&] { return pieces.do_next(); });
  const std::future<void> piece = pieces.add([] { return monotonic_ns() + kHourNs; });
  ASSERT_TRUE(worker.wake());
  EXPECT_EQ(piece.wait_for(kPatience), std::future_status::ready);
}

// A thread of the size of the address space cannot be made.
TEST_F(WorkerTest, ThreadCannotBeMade_IsAnErrorAndTheNextCallTriesAgain) {
  pthread_attr_t usual;
  pthread_attr_t huge;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_attr_init(&huge), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, std::size_t{1} << 62), 0);
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  const std::future<void> piece = pieces_.add([] { return kNever; });
  const Status woken = worker_.wake();
  EXPECT_EQ(pthread_setattr_default_np(&usual), 0);
  pthread_attr_destroy(&huge);
  pthread_attr_destroy(&usual);
  ASSERT_FALSE(woken);
  EXPECT_STREQ(woken.error().operation, "pthread_create");
  EXPECT_EQ(woken.error().sys_errno, EAGAIN);
  ASSERT_TRUE(worker_.wake());
  ASSERT_TRUE(is_done(piece));
}

}  // namespace
}  // namespace verbatim
