#include "runtime/event_loop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "support/wait.h"

namespace verbatim {
namespace {

using test::kPatience;

constexpr std::uint64_t kMillisecond = kNanosecondsPerMillisecond;
constexpr std::uint64_t kLongNs = 7'200 * kNanosecondsPerSecond;

class EventLoopTest : public testing::Test {
 protected:
  EventLoopTest() {
    const Status opened = loop_.open();
    EXPECT_TRUE(opened);
  }
  ~EventLoopTest() override { stop(); }

  void start() {
    thread_ = std::thread([this] { loop_.run(); });
  }
  void stop() {
    loop_.stop();
    if (thread_.joinable()) thread_.join();
  }
  template <typename Value>
  static std::optional<Value> get(std::promise<Value>& promise) {
    std::future<Value> future = promise.get_future();
    if (future.wait_for(kPatience) != std::future_status::ready) return std::nullopt;
    return future.get();
  }
  // What was asked of the loop before has been done.
  void settle() {
    std::promise<bool> settled;
    EventHandler last(loop_, nullptr, [&, calls = 0]() mutable {
      if (++calls < 3) return std::uint64_t{0};
      settled.set_value(true);
      return kNever;
    });
    last.call_at(0);
    EXPECT_TRUE(get(settled));
  }
  static void add(const UniqueFd& counter) {
    const std::uint64_t one = 1;
    EXPECT_EQ(::write(counter.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
  static UniqueFd make_counter() { return UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)); }

  EventLoop loop_;
  std::thread thread_;
};

TEST_F(EventLoopTest, DescriptorIsReady_HandlerIsCalledWithItsId) {
  const UniqueFd counter = make_counter();
  std::promise<int> called;
  const EventHandler handler(loop_, [&](int id) { called.set_value(id); });
  ASSERT_TRUE(handler.watch(counter.get(), EventHandler::kReadableOnce, -2));
  start();
  add(counter);
  EXPECT_EQ(get(called), -2);
}

TEST_F(EventLoopTest, EventOnce_IsReportedAgainAfterWatch) {
  const UniqueFd counter = make_counter();
  std::vector<int> ids;
  const EventHandler handler(loop_, [&](int id) { ids.push_back(id); });
  ASSERT_TRUE(handler.watch(counter.get(), EventHandler::kReadableOnce, 1));
  start();
  add(counter);
  settle();
  settle();
  ASSERT_TRUE(handler.watch(counter.get(), EventHandler::kWritableOnce, 2));
  settle();
  stop();
  EXPECT_EQ(ids, (std::vector<int>{1, 2}));
}

TEST_F(EventLoopTest, Readable_IsReportedAsLongAsItIsTrue) {
  const UniqueFd counter = make_counter();
  std::promise<int> called;
  int left = 3;
  const EventHandler handler(loop_, [&](int) {
    if (--left != 0) return;
    std::uint64_t count = 0;
    EXPECT_EQ(::read(counter.get(), &count, sizeof count), static_cast<ssize_t>(sizeof count));
    called.set_value(left);
  });
  ASSERT_TRUE(handler.watch(counter.get(), EventHandler::kReadable));
  add(counter);
  start();
  EXPECT_EQ(get(called), 0);
  settle();
  stop();
  EXPECT_EQ(left, 0);
}

TEST_F(EventLoopTest, Unwatched_IsNotReported) {
  const UniqueFd counter = make_counter();
  std::atomic<int> calls{0};
  const EventHandler handler(loop_, [&](int) { calls.fetch_add(1); });
  ASSERT_TRUE(handler.watch(counter.get(), EventHandler::kReadable));
  handler.unwatch(counter.get());
  add(counter);
  start();
  settle();
  EXPECT_EQ(calls.load(), 0);
  ASSERT_TRUE(handler.watch(counter.get(), EventHandler::kReadableOnce));
  settle();
  EXPECT_EQ(calls.load(), 1);
}

// A file is always ready, so epoll takes none.
TEST_F(EventLoopTest, DescriptorOfAFile_IsAnErrorOfEpoll) {
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  const EventHandler handler(loop_, [](int) {});
  const Status watched = handler.watch(file.get(), EventHandler::kReadable);
  ASSERT_FALSE(watched);
  EXPECT_STREQ(watched.error().operation, "epoll_ctl");
  EXPECT_EQ(watched.error().sys_errno, EPERM);
}

TEST_F(EventLoopTest, Times_AreKeptInTheirOrder) {
  std::vector<int> order;
  std::promise<bool> done;
  const std::uint64_t begin = monotonic_ns();
  std::uint64_t end = 0;
  EventHandler third(loop_, nullptr, [&] {
    order.push_back(3);
    end = monotonic_ns();
    done.set_value(true);
    return kNever;
  });
  EventHandler first(loop_, nullptr, [&] { return order.push_back(1), kNever; });
  EventHandler second(loop_, nullptr, [&] { return order.push_back(2), kNever; });
  third.call_at(begin + 30 * kMillisecond);
  first.call_at(begin + 10 * kMillisecond);
  second.call_at(begin + 20 * kMillisecond);
  start();
  ASSERT_TRUE(get(done));
  stop();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_GE(end, begin + 30 * kMillisecond);
}

TEST_F(EventLoopTest, EarlierTimeWhileItWaits_WakesIt) {
  std::promise<bool> called;
  EventHandler handler(loop_, nullptr, [&] { return called.set_value(true), kNever; });
  handler.call_at(monotonic_ns() + kLongNs);
  start();
  settle();
  handler.call_at(0);
  EXPECT_TRUE(get(called));
}

TEST_F(EventLoopTest, LaterTime_DoesNotPutOffTheEarlierOne) {
  std::promise<bool> called;
  EventHandler handler(loop_, nullptr, [&] { return called.set_value(true), kNever; });
  handler.call_at(monotonic_ns() + kMillisecond);
  handler.call_at(monotonic_ns() + kLongNs);
  start();
  EXPECT_TRUE(get(called));
}

TEST_F(EventLoopTest, ReturnedTime_IsTheNextCall) {
  std::promise<std::uint64_t> called;
  std::uint64_t due_ns = 0;
  EventHandler handler(loop_, nullptr, [&] {
    if (due_ns != 0) return called.set_value(monotonic_ns()), kNever;
    return due_ns = monotonic_ns() + 5 * kMillisecond;
  });
  handler.call_at(0);
  start();
  const std::optional<std::uint64_t> called_ns = get(called);
  ASSERT_TRUE(called_ns);
  EXPECT_GE(*called_ns, due_ns);
}

// As when a connection changes while the monitor looks at another one.
TEST_F(EventLoopTest, AskedForDuringTheCall_IsCalledAgain) {
  std::promise<bool> begun;
  std::promise<bool> asked;
  std::promise<bool> again;
  int calls = 0;
  EventHandler handler(loop_, nullptr, [&] {
    if (++calls == 2) return again.set_value(true), kNever;
    begun.set_value(true);
    EXPECT_TRUE(get(asked));
    return monotonic_ns() + kLongNs;
  });
  handler.call_at(0);
  start();
  ASSERT_TRUE(get(begun));
  handler.call_at(0);
  asked.set_value(true);
  EXPECT_TRUE(get(again));
}

TEST_F(EventLoopTest, HandlerThatIsAlwaysDue_HoldsUpNoOther) {
  const UniqueFd counter = make_counter();
  std::promise<bool> timed;
  std::promise<bool> ready;
  EventHandler busy(loop_, nullptr, [] { return std::uint64_t{0}; });
  EventHandler other(
      loop_, [&](int) { ready.set_value(true); }, [&] { return timed.set_value(true), kNever; });
  ASSERT_TRUE(other.watch(counter.get(), EventHandler::kReadableOnce));
  busy.call_at(0);
  start();
  other.call_at(monotonic_ns() + kMillisecond);
  EXPECT_TRUE(get(timed));
  add(counter);
  EXPECT_TRUE(get(ready));
}

TEST_F(EventLoopTest, DestroyedWhileItIsCalled_WaitsForTheCall) {
  for (const bool timed : {false, true}) {
    const UniqueFd counter = make_counter();
    std::promise<bool> begun;
    std::promise<bool> may_end;
    std::atomic<bool> ended{false};
    const auto call = [&] {
      begun.set_value(true);
      EXPECT_TRUE(get(may_end));
      ended.store(true);
      return kNever;
    };
    auto handler = std::make_unique<EventHandler>(
        loop_, [&](int) { call(); }, call);
    if (timed) {
      handler->call_at(0);
    } else {
      ASSERT_TRUE(handler->watch(counter.get(), EventHandler::kReadableOnce));
    }
    if (!thread_.joinable()) start();
    add(counter);
    ASSERT_TRUE(get(begun));
    std::promise<bool> destroyed;
    std::future<bool> at_destruction = destroyed.get_future();
    std::thread destroyer([&] {
      handler.reset();
      destroyed.set_value(ended.load());
    });
    EXPECT_EQ(at_destruction.wait_for(std::chrono::milliseconds(1)), std::future_status::timeout);
    may_end.set_value(true);
    destroyer.join();
    EXPECT_TRUE(at_destruction.get());
  }
}

TEST_F(EventLoopTest, DestroyedWithAnEvent_IsNotCalled) {
  const UniqueFd counters[] = {make_counter(), make_counter()};
  std::unique_ptr<EventHandler> handlers[2];
  std::promise<int> called;
  for (const int own : {0, 1}) {
    const auto call = [&, own] {
      handlers[1 - own].reset();  // its event has come with this one
      called.set_value(own);
      return kNever;
    };
    handlers[own] = std::make_unique<EventHandler>(
        loop_, [call](int) { call(); }, call);
    ASSERT_TRUE(handlers[own]->watch(counters[own].get(), EventHandler::kReadableOnce));
    add(counters[own]);
  }
  start();
  ASSERT_TRUE(get(called));
  settle();
}

TEST_F(EventLoopTest, StoppedBeforeItRuns_ReturnsAtOnce) {
  loop_.stop();
  loop_.run();
}

TEST_F(EventLoopTest, ManyThreadsAsk_EachRequestIsFollowedByACall) {
  constexpr int kThreads = 4;
  constexpr int kRequests = 2000;
  std::atomic<int> requested{0};
  std::atomic<int> seen{0};
  EventHandler handler(loop_, nullptr, [&] { return seen.store(requested.load()), kNever; });
  start();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int request = 0; request < kRequests; ++request) {
        const int number = requested.fetch_add(1) + 1;
        handler.call_at(0);
        test::Wait wait(kPatience);
        while (seen.load() < number) {
          if (wait.is_over()) return ADD_FAILURE() << "request " << number << " was not followed by a call";
          std::this_thread::yield();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace verbatim
