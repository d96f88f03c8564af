// Threads, locks and time of a simulated run.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <ctime>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "simulation/captured_run.h"

namespace simulation {
namespace {

using namespace std::chrono_literals;
using Steady = std::chrono::steady_clock;

// Two threads that take turns by a condition variable.
bool take_turns() {
  std::mutex mutex;
  std::condition_variable changed;
  int turn = 0;
  const auto take = [&](int own) {
    for (int i = 0; i < 20; ++i) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return turn % 2 == own; });
      ++turn;
      changed.notify_one();
    }
  };
  std::thread first(take, 0);
  std::thread second(take, 1);
  first.join();
  second.join();
  return turn == 40;
}

TEST(Scheduler, SeedAgain_HasTheSameRun) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Result first = run({.seed = seed}, take_turns);
    const Result second = run({.seed = seed}, take_turns);
    EXPECT_TRUE(first.passed && second.passed) << seed;
    EXPECT_EQ(first.outcome.hash, second.outcome.hash) << seed;
    EXPECT_EQ(first.outcome.ended, second.outcome.ended) << seed;
  }
}

TEST(Scheduler, OtherSeeds_HaveOtherRuns) {
  std::set<std::uint64_t> hashes;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) hashes.insert(run({.seed = seed}, take_turns).outcome.hash);
  EXPECT_EQ(hashes.size(), 50U);
}

// What --again of the program finds.
TEST(Scheduler, OrderOfAddresses_ChangesTheRunWithNewOnes) {
  const auto job = [] {
    std::set<std::unique_ptr<int>> numbers;
    for (int i = 0; i < 20; ++i) numbers.insert(std::make_unique<int>(i));
    for (const std::unique_ptr<int>& number : numbers) record("number", *number);
    return true;
  };
  const Result plain = run({}, job);
  EXPECT_EQ(plain.outcome.hash, run({}, job).outcome.hash);
  EXPECT_NE(plain.outcome.hash, run({.addresses = 1}, job).outcome.hash);
}

TEST(Scheduler, WhileTheTurnIsKept_NoOtherThreadRuns) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const Result result = run({.seed = seed}, [] {
      std::atomic<bool> has_run = false;
      bool is_early = false;
      std::thread thread;
      {
        const KeepTurn keep;
        thread = std::thread([&] { has_run = true; });
        for (int i = 0; i < 1000; ++i) step("a step");
        is_early = has_run;
      }
      thread.join();
      return !is_early && has_run;
    });
    EXPECT_TRUE(result.passed) << seed;
  }
}

TEST(Scheduler, UnlockedCounter_LosesAnAdditionWithSomeSeeds) {
  int lost = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const Result result = run({.seed = seed}, [] {
      std::mutex mutex;
      int counter = 0;
      const auto add = [&] {
        const int before = counter;
        mutex.lock();  // another thread may go on here
        mutex.unlock();
        counter = before + 1;
      };
      std::thread first(add);
      std::thread second(add);
      first.join();
      second.join();
      return counter == 2;
    });
    lost += result.passed ? 0 : 1;
  }
  EXPECT_GT(lost, 0);
  EXPECT_LT(lost, 50);
}

TEST(Scheduler, Sleeps_TakeVirtualTimeOnly) {
  const auto begin = Steady::now();
  const Result result = run({}, [] {
    const auto steady = Steady::now();
    const auto system = std::chrono::system_clock::now();
    timeval day_before{};
    gettimeofday(&day_before, nullptr);
    std::this_thread::sleep_for(1000s);
    for (int i = 0; i < 1000; ++i) ::usleep(999'999);
    const timespec second{1, 0};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &second, nullptr);
    timeval day_after{};
    gettimeofday(&day_after, nullptr);
    const auto is_right = [](auto passed) { return passed >= 2000s && passed < 2001s; };
    return is_right(Steady::now() - steady) && is_right(std::chrono::system_clock::now() - system) &&
           is_right(std::chrono::seconds(day_after.tv_sec - day_before.tv_sec)) && std::time(nullptr) > 1'893'456'000;
  });
  EXPECT_TRUE(result.passed);
  EXPECT_LT(Steady::now() - begin, 60s);
}

TEST(Scheduler, TimedWaits_EndAtTheirDeadlines) {
  const CapturedRun captured = captured_run({}, [] {
    std::mutex mutex;
    std::condition_variable changed;
    std::unique_lock lock(mutex);
    const auto takes = [](Steady::duration expected, auto wait) {
      const auto begin = Steady::now();
      wait();
      const auto passed = Steady::now() - begin;
      return passed >= expected && passed < expected + 1ms;
    };
    std::uint32_t word = 1;
    const timespec seconds{7, 0};
    return takes(5s, [&] { changed.wait_for(lock, 5s); }) &&
           takes(6s, [&] { changed.wait_until(lock, std::chrono::system_clock::now() + 6s); }) &&
           takes(7s, [&] { ::syscall(SYS_futex, &word, FUTEX_WAIT, 1, &seconds, nullptr, 0); }) &&
           takes(0s, [&] { ::syscall(SYS_futex, &word, FUTEX_WAIT, 2, nullptr, nullptr, 0); });
  });
  EXPECT_TRUE(captured.result.passed) << captured.text;
}

TEST(Scheduler, MutexThatIsNeverReleased_IsADeadlockWithNames) {
  const CapturedRun captured = captured_run({.seed = 4}, [] {
    std::mutex mutex;
    mutex.lock();
    std::thread thread([&] {
      pthread_setname_np(pthread_self(), "waits");
      const std::lock_guard lock(mutex);
    });
    thread.join();
    return true;
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("seed 4 at "), std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("deadlock"), std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("thread 0 waits in pthread_join"), std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("thread 1 waits waits in pthread_mutex_lock"), std::string::npos) << captured.text;
}

TEST(Scheduler, RunBeyondItsLimit_Fails) {
  const CapturedRun captured = captured_run({.limit = 60 * kSecond}, [] {
    while (true) std::this_thread::sleep_for(10s);
    return true;
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("limit of virtual time"), std::string::npos) << captured.text;
}

TEST(Scheduler, ThreadThatIsLeft_IsALeak) {
  const CapturedRun captured = captured_run({}, [] {
    std::thread([] { std::this_thread::sleep_for(100s); }).detach();
    return true;
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("leak: 1 threads"), std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("thread 1 "), std::string::npos) << captured.text;
}

TEST(Scheduler, Crash_FailsWithWhatThreadsDid) {
  const CapturedRun captured = captured_run({}, [] {
    step(std::make_unique<std::string>("a name of the child")->c_str());
    return std::raise(SIGKILL) == 0;
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("Killed"), std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("thread 0 runs in a name of the child"), std::string::npos) << captured.text;
}

TEST(Scheduler, LoopWithoutACall_FailsWithItsThread) {
  const CapturedRun captured = captured_run({}, [] {
    volatile bool goes_on = true;
    std::thread([&] {
      ::kill(::getppid(), SIGALRM);  // as if two minutes had passed
      while (goes_on) continue;
    }).join();
    return true;
  });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("does not end its call"), std::string::npos) << captured.text;
  EXPECT_NE(captured.text.find("thread 1 runs in its begin"), std::string::npos) << captured.text;
}

TEST(Scheduler, UnknownFunction_EndsTheRunWithItsName) {
  const CapturedRun captured = captured_run({}, [] { return ::select(0, nullptr, nullptr, nullptr, nullptr) == 0; });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("select was called"), std::string::npos) << captured.text;
}

// The thread that polls costs calls, not the hour.
TEST(Scheduler, PollInVain_TimeGoesOn) {
  const Result result = run({.limit = 7200 * kSecond}, [] {
    std::atomic<bool> is_done = false;
    std::thread thread([&] {
      std::this_thread::sleep_for(1h);
      is_done = true;
    });
    while (!is_done) ::sched_yield();
    thread.join();
    return true;
  });
  EXPECT_TRUE(result.passed);
  EXPECT_LT(result.outcome.events, 2'000'000U);
}

TEST(Scheduler, TwoThreadsPollForEachOther_TimeDoesNotRunAway) {
  const Result result = run({}, [] {
    std::atomic<int> turn = 0;
    const auto take = [&](int own) {
      for (int i = 0; i < 20; ++i) {
        while (turn % 2 != own) ::sched_yield();
        note_progress();
        ++turn;
      }
    };
    std::thread first(take, 0);
    std::thread second(take, 1);
    first.join();
    second.join();
    return now() < kMillisecond;
  });
  EXPECT_TRUE(result.passed);
}

TEST(Scheduler, PollForLong_LooksLessOftenAlsoBesideAThreadThatSleeps) {
  const Result result = run({}, [] {
    long polls = 0;
    std::atomic<bool> ends = false;
    std::thread periodic([&] {
      while (!ends) std::this_thread::sleep_for(10ms);
    });
    while (now() < 60 * kSecond) {
      ::sched_yield();
      ++polls;
    }
    ends = true;
    periodic.join();
    return polls < 3000;
  });
  EXPECT_TRUE(result.passed);
  EXPECT_LT(result.outcome.ended, 61 * kSecond);
}

TEST(Scheduler, OnceThatSleeps_OthersWaitInTheSimulation) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const Result result = run({.seed = seed}, [] {
      std::once_flag once;
      std::atomic<int> calls = 0;
      std::atomic<int> too_early = 0;
      const auto enter = [&] {
        std::call_once(once, [&] {
          std::this_thread::sleep_for(1s);
          ++calls;
        });
        // The same by the compiler's guard, which waits with futex.
        static const bool made = [] {
          std::this_thread::sleep_for(1s);
          return true;
        }();
        if (calls != 1 || !made) ++too_early;
      };
      std::thread first(enter);
      std::thread second(enter);
      enter();
      first.join();
      second.join();
      return calls == 1 && too_early == 0;
    });
    EXPECT_TRUE(result.passed) << seed;
  }
}

struct LocksAtItsEnd {
  std::mutex* mutex = nullptr;
  int* ends = nullptr;
  ~LocksAtItsEnd() {
    const std::lock_guard lock(*mutex);
    std::this_thread::sleep_for(1s);
    ++*ends;
  }
};

TEST(Scheduler, DestructorsOfAThread_ArePartOfTheRun) {
  const Result result = run({}, [] {
    std::mutex mutex;
    int ends = 0;
    const auto enter = [&] {
      thread_local LocksAtItsEnd object;
      object.mutex = &mutex;
      object.ends = &ends;
    };
    std::thread first(enter);
    std::thread second(enter);
    first.join();
    second.join();
    return ends == 2 && now() >= 2 * kSecond;
  });
  EXPECT_TRUE(result.passed);
}

}  // namespace
}  // namespace simulation
