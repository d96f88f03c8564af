// Who is named when a connection stands still, and when: with a clock of our own, and over connections.
#include "net/stall.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "link.h"
#include "support/log_capture.h"

namespace verbatim {
namespace {

using wire::View;
using Step = StallWatch::Step;

constexpr std::uint64_t kSecond = kNanosecondsPerSecond;
constexpr StallSettings kUsual{.warn_ns = 30 * kSecond, .fail_ns = 0};

View sender(std::uint32_t members, std::uint32_t outstanding, unsigned flags) {
  return {.sends = 1, .flags = static_cast<std::uint16_t>(flags), .members = members, .outstanding = outstanding};
}
View receiver(std::uint32_t members, std::uint32_t outstanding, unsigned flags = View::kPolls) {
  return {.flags = static_cast<std::uint16_t>(flags), .members = members, .outstanding = outstanding};
}

TEST(Blame, OfASender) {
  const auto blame = [](const View& mine, std::optional<View> peer) { return blame_for(mine, peer); };
  EXPECT_EQ(blame(sender(7, 0, View::kWaits), receiver(7, 0)), Blame::kPeerReceives);
  EXPECT_EQ(blame(sender(7, 0, View::kWaits), receiver(8, 1)), Blame::kCts);
  EXPECT_EQ(blame(sender(0xffffffff, 0, View::kWaits), receiver(0, 1)), Blame::kCts);  // numbers come round
  EXPECT_EQ(blame(sender(7, 0, View::kWaits | View::kCtsReady), receiver(8, 1)), Blame::kPeerDiffers);
  EXPECT_EQ(blame(sender(7, 0, View::kWaits), std::nullopt), Blame::kPeerDoesNotTell);
  EXPECT_EQ(blame(sender(7, 2, View::kPolls), receiver(7, 2)), Blame::kNetwork);
  EXPECT_EQ(blame(sender(7, 2, View::kPolls), std::nullopt), Blame::kNetwork);
  EXPECT_EQ(blame(sender(7, 2, 0), receiver(7, 2)), Blame::kOwnApplication);
  EXPECT_EQ(blame(sender(7, 0, 0), receiver(7, 0)), Blame::kNobody);
}

TEST(Blame, OfAReceiver) {
  const auto blame = [](const View& mine, std::optional<View> peer) { return blame_for(mine, peer); };
  EXPECT_EQ(blame(receiver(8, 1), sender(7, 0, 0)), Blame::kPeerSends);
  EXPECT_EQ(blame(receiver(8, 1), sender(7, 0, View::kCtsReady)), Blame::kPeerSends);
  EXPECT_EQ(blame(receiver(8, 1), sender(7, 0, View::kWaits)), Blame::kCts);
  EXPECT_EQ(blame(receiver(8, 1), sender(7, 0, View::kWaits | View::kCtsReady)), Blame::kPeerDiffers);
  EXPECT_EQ(blame(receiver(8, 1), sender(8, 1, View::kPolls)), Blame::kNetwork);
  EXPECT_EQ(blame(receiver(8, 1), sender(8, 0, View::kPolls)), Blame::kCompletion);
  EXPECT_EQ(blame(receiver(8, 1, 0), sender(8, 0, View::kPolls)), Blame::kOwnApplication);
  EXPECT_EQ(blame(receiver(8, 1), std::nullopt), Blame::kPeerDoesNotTell);
  EXPECT_EQ(blame(receiver(8, 0, View::kOptional), sender(8, 0, 0)), Blame::kNobody);
  View flushing = receiver(8, 0);
  flushing.flushes = 1;
  EXPECT_EQ(blame(flushing, sender(8, 0, 0)), Blame::kDevice);
  flushing.flags = 0;
  EXPECT_EQ(blame(flushing, std::nullopt), Blame::kOwnApplication);
}

TEST(Blame, IsALineThatNamesThePeer) {
  for (int blame = 1; blame <= static_cast<int>(Blame::kPeerDoesNotTell); ++blame) {
    char text[320];
    describe_blame(static_cast<Blame>(blame), "node17 (pid 4711)", text);
    EXPECT_NE(std::string(text).find("node17 (pid 4711)"), std::string::npos) << text;
    EXPECT_LT(std::string(text).size(), 200U) << text;
  }
}

// A second a look.
class Watch : public ::testing::Test {
 protected:
  Step look(const View& view, bool waits = false, bool polls = true) {
    now_ += kSecond;
    return watch_.look(settings_, now_, view, waits, polls);
  }
  // So many seconds in which nothing is to be done.
  void rest(int seconds, const View& view, bool waits = false) {
    for (int i = 0; i < seconds; ++i) ASSERT_EQ(look(view, waits), Step::kNothing) << i;
  }
  bool answer(View view) {
    view.id = watch_.question();
    return watch_.hear(view);
  }

  StallSettings settings_ = kUsual;
  StallWatch watch_;
  std::uint64_t now_ = 1000 * kSecond;
};

TEST_F(Watch, ReportsOnceAndAgainOnlyAfterItHasMoved) {
  ASSERT_NO_FATAL_FAILURE(rest(30, receiver(8, 1)));
  EXPECT_EQ(look(receiver(8, 1)), Step::kAsk);
  EXPECT_EQ(look(receiver(8, 1)), Step::kNothing);
  EXPECT_TRUE(answer(sender(7, 0, 0)));
  EXPECT_EQ(look(receiver(8, 1)), Step::kReport);
  EXPECT_EQ(watch_.blame(), Blame::kPeerSends);
  EXPECT_EQ(watch_.still_ns(now_), 32 * kSecond);
  ASSERT_NO_FATAL_FAILURE(rest(3600, receiver(8, 1)));
  EXPECT_EQ(look(receiver(8, 0)), Step::kMovesAgain);
  EXPECT_EQ(watch_.stood_ns(), 3633 * kSecond);
  ASSERT_NO_FATAL_FAILURE(rest(3600, receiver(8, 0)));
  ASSERT_NO_FATAL_FAILURE(rest(30, receiver(9, 1)));
  EXPECT_EQ(look(receiver(9, 1)), Step::kAsk);
}

TEST_F(Watch, AnIdleHourMakesNoNoise) {
  ASSERT_NO_FATAL_FAILURE(rest(3600, receiver(8, 0)));
  StallWatch other;
  for (int i = 0; i < 3600; ++i) {
    EXPECT_EQ(other.look(settings_, now_ += kSecond, sender(8, 0, View::kCtsReady), false, false), Step::kNothing);
  }
}

TEST_F(Watch, WhatMovesIsNeverReported) {
  for (std::uint32_t i = 0; i < 3600; ++i) ASSERT_EQ(look(receiver(i, 1)), Step::kNothing);
}

TEST_F(Watch, APeerThatDoesNotAnswerIsNamedAfterTwoSeconds) {
  ASSERT_NO_FATAL_FAILURE(rest(30, receiver(8, 1)));
  EXPECT_EQ(look(receiver(8, 1)), Step::kAsk);
  EXPECT_EQ(look(receiver(8, 1)), Step::kNothing);
  EXPECT_EQ(look(receiver(8, 1)), Step::kReport);
  EXPECT_EQ(watch_.blame(), Blame::kPeerDoesNotTell);
}

TEST_F(Watch, ASenderWaitsFromItsFirstRefusalOnAndNotLongerThanItIsRefused) {
  ASSERT_NO_FATAL_FAILURE(rest(3600, sender(8, 0, 0)));
  ASSERT_NO_FATAL_FAILURE(rest(20, sender(8, 0, 0), true));
  ASSERT_NO_FATAL_FAILURE(rest(3600, sender(8, 0, 0)));  // it has given up
  ASSERT_NO_FATAL_FAILURE(rest(30, sender(8, 0, 0), true));
  EXPECT_EQ(look(sender(8, 0, 0), true), Step::kAsk);
  EXPECT_TRUE(answer(receiver(8, 0)));
  EXPECT_EQ(look(sender(8, 0, 0), true), Step::kReport);
  EXPECT_EQ(watch_.blame(), Blame::kPeerReceives);
}

// Optional receives end without a word: the peer knows whether they were served, and is asked once.
TEST_F(Watch, OptionalReceivesThatWereServedAreAskedForOnce) {
  const View optional = receiver(8, 0, View::kOptional);
  ASSERT_NO_FATAL_FAILURE(rest(30, optional));
  EXPECT_EQ(look(optional), Step::kAsk);
  EXPECT_TRUE(answer(sender(8, 0, 0)));
  ASSERT_NO_FATAL_FAILURE(rest(3600, optional));
  const View more = receiver(9, 0, View::kOptional);
  ASSERT_NO_FATAL_FAILURE(rest(30, more));
  EXPECT_EQ(look(more), Step::kAsk);
  EXPECT_TRUE(answer(sender(8, 0, 0)));
  EXPECT_EQ(look(more), Step::kReport);
  EXPECT_EQ(watch_.blame(), Blame::kPeerSends);
}

// Nobody waits for what was served, or was not: that the peer is slow to say is no stall.
TEST_F(Watch, OptionalReceivesOfASilentPeerAreNotReported) {
  const View optional = receiver(8, 0, View::kOptional);
  ASSERT_NO_FATAL_FAILURE(rest(30, optional));
  int questions = 0;
  for (int i = 0; i < 60; ++i) {
    const Step step = look(optional);
    ASSERT_TRUE(step == Step::kNothing || step == Step::kAsk) << i;
    questions += step == Step::kAsk ? 1 : 0;
  }
  EXPECT_GT(questions, 1);
}

// Nobody looked, so nobody tested either.
TEST_F(Watch, TimeInWhichThisProcessWasStoppedIsNoStall) {
  ASSERT_NO_FATAL_FAILURE(rest(20, receiver(8, 1)));
  now_ += 1000 * kSecond;
  ASSERT_NO_FATAL_FAILURE(rest(11, receiver(8, 1)));
  EXPECT_EQ(look(receiver(8, 1)), Step::kAsk);
}

TEST_F(Watch, ASenderThatDoesNotTestHoldsUpWhatComesNext) {
  EXPECT_EQ(blame_for(receiver(9, 1), sender(8, 1, 0)), Blame::kPeerSends);
  EXPECT_EQ(blame_for(receiver(9, 1), sender(8, 1, View::kPolls)), Blame::kNetwork);
  EXPECT_EQ(blame_for(receiver(8, 1), sender(8, 1, 0)), Blame::kNetwork);
}

TEST_F(Watch, AnAnswerToAnotherQuestionIsNone) {
  ASSERT_NO_FATAL_FAILURE(rest(10, receiver(8, 1)));
  EXPECT_FALSE(answer(sender(7, 0, 0)));
  ASSERT_NO_FATAL_FAILURE(rest(20, receiver(8, 1)));
  ASSERT_EQ(look(receiver(8, 1)), Step::kAsk);
  View late = sender(7, 0, 0);
  late.id = watch_.question() - 1;
  EXPECT_FALSE(watch_.hear(late));
  EXPECT_FALSE(answer(receiver(7, 0)));  // the peer of a receiver sends
}

TEST_F(Watch, FailsAfterItsTimeWithAFreshAnswer) {
  settings_.fail_ns = 60 * kSecond;
  ASSERT_NO_FATAL_FAILURE(rest(30, receiver(8, 1)));
  ASSERT_EQ(look(receiver(8, 1)), Step::kAsk);
  ASSERT_TRUE(answer(sender(7, 0, 0)));
  ASSERT_EQ(look(receiver(8, 1)), Step::kReport);
  ASSERT_NO_FATAL_FAILURE(rest(28, receiver(8, 1)));
  ASSERT_EQ(look(receiver(8, 1)), Step::kAsk);
  ASSERT_TRUE(answer(sender(8, 1, View::kPolls)));
  ASSERT_EQ(look(receiver(8, 1)), Step::kFail);
  EXPECT_EQ(watch_.blame(), Blame::kNetwork);
}

// Over connections whose two ends are this process's.
class Stall : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"VERBATIM_STALL_WARN_S", "VERBATIM_STALL_FAIL_S"}) {
      ::unsetenv(name);
    }
  }

  // Drives the connection until so many lines tell of a stall.
  template <typename Drive>
  static std::vector<std::string> reports(const LogCapture& log, std::size_t count, Drive drive) {
    Link::eventually([&] {
      drive();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return log.warnings().size() >= count;
    });
    return log.warnings();
  }
};

TEST_F(Stall, AReceiverThatIsLateIsNamedAtTheSender) {
  ::setenv("VERBATIM_STALL_WARN_S", "1", 1);
  Link link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 8);
  const LogCapture log;
  const auto lines = reports(log, 1, [&] { buffers.isend(8); });
  ASSERT_EQ(lines.size(), 1U);
  std::printf("%s\n", lines[0].c_str());
  EXPECT_NE(lines[0].find("pid " + std::to_string(::getpid()) + ") is late: its application has not posted"),
            std::string::npos);
  EXPECT_NE(lines[0].find("there: 0 receives posted"), std::string::npos);
  EXPECT_NE(lines[0].find("QPs in RTS"), std::string::npos);
}

TEST_F(Stall, ASenderThatIsLateIsNamedAtTheReceiver) {
  ::setenv("VERBATIM_STALL_WARN_S", "1", 1);
  Link link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 8);
  Request* receive = buffers.irecv(8);
  ASSERT_NE(receive, nullptr);
  const LogCapture log;
  const auto lines = reports(log, 1, [&] {
    int done = 0;
    RecvComm::test(*receive, &done, nullptr);
  });
  ASSERT_EQ(lines.size(), 1U);
  std::printf("%s\n", lines[0].c_str());
  EXPECT_NE(lines[0].find("is late: its application has not sent"), std::string::npos);
  EXPECT_NE(lines[0].find("here: 1 receives posted (0 bytes came), 1 not arrived and tested for"), std::string::npos);
  EXPECT_NE(lines[0].find("isend not called"), std::string::npos);
}

TEST_F(Stall, AProcessThatDoesNotTestIsLateItself) {
  ::setenv("VERBATIM_STALL_WARN_S", "1", 1);
  Link link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 8);
  ASSERT_NE(buffers.irecv(8), nullptr);
  ASSERT_NE(link.posted([&] { return buffers.isend(8); }), nullptr);
  const LogCapture log;
  const auto lines = reports(log, 1, [&] { link.send().progress(); });
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("this process is late"), std::string::npos) << lines[0];
}

TEST_F(Stall, BecomesAnErrorAtBothEnds) {
  ::setenv("VERBATIM_STALL_WARN_S", "0", 1);
  ::setenv("VERBATIM_STALL_FAIL_S", "1", 1);
  Link link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 8);
  ASSERT_NE(buffers.irecv(8), nullptr);
  const LogCapture log;
  reports(log, 2, [&] {
    link.recv().progress();
    buffers.isend(8, 99);  // no receive has this tag
  });
  ASSERT_NE(link.recv().error(), nullptr);
  ASSERT_NE(link.send().error(), nullptr);
  EXPECT_EQ(link.recv().error()->kind, ErrorKind::kRemote);
  EXPECT_EQ(link.send().error()->kind, ErrorKind::kRemote);
  EXPECT_NE(log.warnings()[0].find("VERBATIM_STALL_FAIL_S"), std::string::npos);
  EXPECT_NE(log.warnings()[0].find("not the same tag"), std::string::npos) << log.warnings()[0];
}

}  // namespace
}  // namespace verbatim
