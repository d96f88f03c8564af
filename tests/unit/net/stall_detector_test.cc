// When a stall is reported and with which cause, with the times of the test.
#include "net/monitor/stall_detector.h"

#include <gtest/gtest.h>

#include <string>

namespace verbatim {
namespace {

using wire::ConnectionStatus;
using Action = StallDetector::Action;

constexpr std::uint64_t kSecond = kNanosecondsPerSecond;
constexpr StallSettings kUsual{.warn_ns = 30 * kSecond, .fail_ns = 0};

ConnectionStatus sender(std::uint32_t members, std::uint32_t outstanding, unsigned flags) {
  return {.sends = 1, .flags = static_cast<std::uint16_t>(flags), .members = members, .outstanding = outstanding};
}
ConnectionStatus receiver(std::uint32_t members, std::uint32_t outstanding,
                          unsigned flags = ConnectionStatus::kTested) {
  return {.flags = static_cast<std::uint16_t>(flags), .members = members, .outstanding = outstanding};
}

TEST(StallCause, SenderStalled_IsDerivedFromBothStatuses) {
  const auto cause = [](const ConnectionStatus& local, std::optional<ConnectionStatus> peer) {
    return find_stall_cause(local, peer);
  };
  EXPECT_EQ(cause(sender(7, 0, ConnectionStatus::kSendRefused), receiver(7, 0)), StallCause::kPeerPostsNoReceive);
  EXPECT_EQ(cause(sender(7, 0, ConnectionStatus::kSendRefused), receiver(8, 1)), StallCause::kCtsNotReceived);
  EXPECT_EQ(cause(sender(0xffffffff, 0, ConnectionStatus::kSendRefused), receiver(0, 1)),
            StallCause::kCtsNotReceived);  // the count has wrapped around
  EXPECT_EQ(cause(sender(7, 0, ConnectionStatus::kSendRefused | ConnectionStatus::kCtsReady), receiver(8, 1)),
            StallCause::kMismatchedCalls);
  EXPECT_EQ(cause(sender(7, 0, ConnectionStatus::kSendRefused), std::nullopt), StallCause::kPeerDoesNotReply);
  EXPECT_EQ(cause(sender(7, 2, ConnectionStatus::kTested), receiver(7, 2)), StallCause::kNetwork);
  EXPECT_EQ(cause(sender(7, 2, ConnectionStatus::kTested), std::nullopt), StallCause::kNetwork);
  EXPECT_EQ(cause(sender(7, 2, 0), receiver(7, 2)), StallCause::kOwnApplication);
  EXPECT_EQ(cause(sender(7, 0, 0), receiver(7, 0)), StallCause::kNone);
}

TEST(StallCause, ReceiverStalled_IsDerivedFromBothStatuses) {
  const auto cause = [](const ConnectionStatus& local, std::optional<ConnectionStatus> peer) {
    return find_stall_cause(local, peer);
  };
  EXPECT_EQ(cause(receiver(8, 1), sender(7, 0, 0)), StallCause::kPeerSendsNothing);
  EXPECT_EQ(cause(receiver(8, 1), sender(7, 0, ConnectionStatus::kCtsReady)), StallCause::kPeerSendsNothing);
  EXPECT_EQ(cause(receiver(8, 1), sender(7, 0, ConnectionStatus::kSendRefused)), StallCause::kCtsNotReceived);
  EXPECT_EQ(cause(receiver(8, 1), sender(7, 0, ConnectionStatus::kSendRefused | ConnectionStatus::kCtsReady)),
            StallCause::kMismatchedCalls);
  EXPECT_EQ(cause(receiver(8, 1), sender(8, 1, ConnectionStatus::kTested)), StallCause::kNetwork);
  EXPECT_EQ(cause(receiver(8, 1), sender(8, 0, ConnectionStatus::kTested)), StallCause::kCompletionNotReceived);
  EXPECT_EQ(cause(receiver(8, 1, 0), sender(8, 0, ConnectionStatus::kTested)), StallCause::kOwnApplication);
  EXPECT_EQ(cause(receiver(8, 1), std::nullopt), StallCause::kPeerDoesNotReply);
  EXPECT_EQ(cause(receiver(8, 0, ConnectionStatus::kOptionalReceives), sender(8, 0, 0)), StallCause::kNone);
  ConnectionStatus flushing = receiver(8, 0);
  flushing.flushes = 1;
  EXPECT_EQ(cause(flushing, sender(8, 0, 0)), StallCause::kFlushNotCompleted);
  flushing.flags = 0;
  EXPECT_EQ(cause(flushing, std::nullopt), StallCause::kOwnApplication);
}

TEST(StallCause, EveryCause_NamesPeer) {
  for (int cause = 1; cause <= static_cast<int>(StallCause::kPeerDoesNotReply); ++cause) {
    const std::string text = diagnose_stall(static_cast<StallCause>(cause), "node17 (pid 4711)", "mlx5_0").why;
    EXPECT_NE(text.find("node17 (pid 4711)"), std::string::npos) << text;
    EXPECT_LT(text.size(), 200U) << text;
  }
}

// Only the side channel is known to be cut, not the peer.
TEST(StallCause, PeerCannotBeAsked_SideChannelIsNamed) {
  const Diagnosis stall = diagnose_stall(StallCause::kPeerDoesNotReply, "node17 (pid 4711)", "mlx5_0", true);
  EXPECT_NE(stall.why.find("node17 (pid 4711) is not known: the side channel is lost"), std::string::npos) << stall.why;
  EXPECT_NE(stall.next.find("VERBATIM_SOCKET_IFNAME"), std::string::npos) << stall.next;
}

// The local fault is named, not the peer.
TEST(ProbeWithoutAnswer, LocalFault_IsNotThePeers) {
  PathFacts facts;
  EXPECT_TRUE(is_without_answer(IBV_WC_RETRY_EXC_ERR, facts));
  EXPECT_TRUE(is_without_answer(IBV_WC_RESP_TIMEOUT_ERR, facts));
  EXPECT_FALSE(is_without_answer(IBV_WC_LOC_QP_OP_ERR, facts));
  EXPECT_FALSE(is_without_answer(IBV_WC_WR_FLUSH_ERR, facts));
  facts.gid_removed = true;
  EXPECT_FALSE(is_without_answer(IBV_WC_RETRY_EXC_ERR, facts));
  facts = {};
  facts.port_state = IBV_PORT_DOWN;
  EXPECT_FALSE(is_without_answer(IBV_WC_RETRY_EXC_ERR, facts));
  facts = {};
  facts.port_errno = ENODEV;
  EXPECT_FALSE(is_without_answer(IBV_WC_RETRY_EXC_ERR, facts));
}

// One check a second.
class StallDetectorTest : public ::testing::Test {
 protected:
  Action check(const ConnectionStatus& status, bool send_refused = false, bool tested = true) {
    now_ += kSecond;
    return detector_.check(settings_, now_, status, send_refused, tested, suspect_ns_);
  }
  // Checks for so many seconds without an action.
  void rest(int seconds, const ConnectionStatus& status, bool send_refused = false) {
    for (int i = 0; i < seconds; ++i) ASSERT_EQ(check(status, send_refused), Action::kNone) << i;
  }
  bool reply(ConnectionStatus status) {
    status.id = detector_.query_id();
    return detector_.accept_reply(status);
  }

  StallSettings settings_ = kUsual;
  std::uint64_t suspect_ns_ = 0;
  StallDetector detector_;
  std::uint64_t now_ = 1000 * kSecond;
};

TEST_F(StallDetectorTest, Stalled_IsReportedOnceUntilProgress) {
  ASSERT_NO_FATAL_FAILURE(rest(30, receiver(8, 1)));
  EXPECT_EQ(check(receiver(8, 1)), Action::kQuery);
  EXPECT_EQ(check(receiver(8, 1)), Action::kNone);
  EXPECT_TRUE(reply(sender(7, 0, 0)));
  EXPECT_EQ(check(receiver(8, 1)), Action::kReport);
  EXPECT_EQ(detector_.cause(), StallCause::kPeerSendsNothing);
  EXPECT_EQ(detector_.stalled_ns(now_), 32 * kSecond);
  ASSERT_NO_FATAL_FAILURE(rest(3600, receiver(8, 1)));
  EXPECT_EQ(check(receiver(8, 0)), Action::kRecovered);
  EXPECT_EQ(detector_.last_stall_ns(), 3633 * kSecond);
  ASSERT_NO_FATAL_FAILURE(rest(3600, receiver(8, 0)));
  ASSERT_NO_FATAL_FAILURE(rest(30, receiver(9, 1)));
  EXPECT_EQ(check(receiver(9, 1)), Action::kQuery);
}

TEST_F(StallDetectorTest, IdleForAnHour_IsNotReported) {
  ASSERT_NO_FATAL_FAILURE(rest(3600, receiver(8, 0)));
  StallDetector other;
  for (int i = 0; i < 3600; ++i) {
    EXPECT_EQ(other.check(settings_, now_ += kSecond, sender(8, 0, ConnectionStatus::kCtsReady), false, false),
              Action::kNone);
  }
}

TEST_F(StallDetectorTest, ConnectionWithProgress_IsNotReported) {
  for (std::uint32_t i = 0; i < 3600; ++i) ASSERT_EQ(check(receiver(i, 1)), Action::kNone);
}

TEST_F(StallDetectorTest, StatusQueryUnanswered_IsReportedAfterTwoSeconds) {
  ASSERT_NO_FATAL_FAILURE(rest(30, receiver(8, 1)));
  EXPECT_EQ(check(receiver(8, 1)), Action::kQuery);
  EXPECT_EQ(check(receiver(8, 1)), Action::kNone);
  EXPECT_EQ(check(receiver(8, 1)), Action::kReport);
  EXPECT_EQ(detector_.cause(), StallCause::kPeerDoesNotReply);
}

TEST_F(StallDetectorTest, SenderWithoutReceive_IsTimedFromFirstEmptyIsend) {
  ASSERT_NO_FATAL_FAILURE(rest(3600, sender(8, 0, 0)));
  ASSERT_NO_FATAL_FAILURE(rest(20, sender(8, 0, 0), true));
  ASSERT_NO_FATAL_FAILURE(rest(3600, sender(8, 0, 0)));  // the application has stopped calling isend
  ASSERT_NO_FATAL_FAILURE(rest(30, sender(8, 0, 0), true));
  EXPECT_EQ(check(sender(8, 0, 0), true), Action::kQuery);
  EXPECT_TRUE(reply(receiver(8, 0)));
  EXPECT_EQ(check(sender(8, 0, 0), true), Action::kReport);
  EXPECT_EQ(detector_.cause(), StallCause::kPeerPostsNoReceive);
}

// Optional receives complete without a message: only the peer knows whether it has sent, and it is queried once.
TEST_F(StallDetectorTest, OptionalReceivesCompleted_AreQueriedOnce) {
  const ConnectionStatus optional = receiver(8, 0, ConnectionStatus::kOptionalReceives);
  ASSERT_NO_FATAL_FAILURE(rest(30, optional));
  EXPECT_EQ(check(optional), Action::kQuery);
  EXPECT_TRUE(reply(sender(8, 0, 0)));
  ASSERT_NO_FATAL_FAILURE(rest(3600, optional));
  const ConnectionStatus more = receiver(9, 0, ConnectionStatus::kOptionalReceives);
  ASSERT_NO_FATAL_FAILURE(rest(30, more));
  EXPECT_EQ(check(more), Action::kQuery);
  EXPECT_TRUE(reply(sender(8, 0, 0)));
  EXPECT_EQ(check(more), Action::kReport);
  EXPECT_EQ(detector_.cause(), StallCause::kPeerSendsNothing);
}

// The application does not wait for optional receives: without a reply of the peer they are no stall.
TEST_F(StallDetectorTest, OptionalReceivesPeerNotAnswering_AreNotReported) {
  const ConnectionStatus optional = receiver(8, 0, ConnectionStatus::kOptionalReceives);
  ASSERT_NO_FATAL_FAILURE(rest(30, optional));
  int queries = 0;
  for (int i = 0; i < 60; ++i) {
    const Action step = check(optional);
    ASSERT_TRUE(step == Action::kNone || step == Action::kQuery) << i;
    queries += step == Action::kQuery ? 1 : 0;
  }
  EXPECT_GT(queries, 1);
}

// The application was stopped too.
TEST_F(StallDetectorTest, OwnProcessStopped_TimeIsNotCounted) {
  ASSERT_NO_FATAL_FAILURE(rest(20, receiver(8, 1)));
  now_ += 1000 * kSecond;
  ASSERT_NO_FATAL_FAILURE(rest(11, receiver(8, 1)));
  EXPECT_EQ(check(receiver(8, 1)), Action::kQuery);
}

TEST_F(StallDetectorTest, SenderNotTesting_IsTheCauseOfLaterReceives) {
  EXPECT_EQ(find_stall_cause(receiver(9, 1), sender(8, 1, 0)), StallCause::kPeerSendsNothing);
  EXPECT_EQ(find_stall_cause(receiver(9, 1), sender(8, 1, ConnectionStatus::kTested)), StallCause::kNetwork);
  EXPECT_EQ(find_stall_cause(receiver(8, 1), sender(8, 1, 0)), StallCause::kNetwork);
}

TEST_F(StallDetectorTest, StatusReplyToOtherQuery_IsIgnored) {
  ASSERT_NO_FATAL_FAILURE(rest(10, receiver(8, 1)));
  EXPECT_FALSE(reply(sender(7, 0, 0)));
  ASSERT_NO_FATAL_FAILURE(rest(20, receiver(8, 1)));
  ASSERT_EQ(check(receiver(8, 1)), Action::kQuery);
  ConnectionStatus old_reply = sender(7, 0, 0);
  old_reply.id = detector_.query_id() - 1;
  EXPECT_FALSE(detector_.accept_reply(old_reply));
  EXPECT_FALSE(reply(receiver(7, 0)));  // the peer of a receiver sends
}

TEST_F(StallDetectorTest, StalledBeyondFailTime_FailsWithFreshStatus) {
  settings_.fail_ns = 60 * kSecond;
  ASSERT_NO_FATAL_FAILURE(rest(30, receiver(8, 1)));
  ASSERT_EQ(check(receiver(8, 1)), Action::kQuery);
  ASSERT_TRUE(reply(sender(7, 0, 0)));
  ASSERT_EQ(check(receiver(8, 1)), Action::kReport);
  ASSERT_NO_FATAL_FAILURE(rest(28, receiver(8, 1)));
  ASSERT_EQ(check(receiver(8, 1)), Action::kQuery);
  ASSERT_TRUE(reply(sender(8, 1, ConnectionStatus::kTested)));
  ASSERT_EQ(check(receiver(8, 1)), Action::kFail);
  EXPECT_EQ(detector_.cause(), StallCause::kNetwork);
}

// The peer's application may call isend for the first time long after the entry was lost.
TEST_F(StallDetectorTest, CtsEntryIsLost_IsAskedForAgainAndAgain) {
  suspect_ns_ = 5 * kSecond;
  ASSERT_EQ(check(receiver(8, 1)), Action::kNone);
  for (const unsigned peer : {0U, unsigned{ConnectionStatus::kSendRefused}}) {
    rest(4, receiver(8, 1));
    ASSERT_EQ(check(receiver(8, 1)), Action::kQuery);
    ASSERT_TRUE(reply(sender(7, 0, static_cast<std::uint16_t>(peer))));
    EXPECT_EQ(check(receiver(8, 1)), peer == 0 ? Action::kNone : Action::kSuspectCts);
  }
}

TEST_F(StallDetectorTest, CtsEntryIsLostForLong_SuspicionDelaysNeitherLineNorEnd) {
  suspect_ns_ = 1 * kSecond;
  settings_ = {.warn_ns = 4 * kSecond, .fail_ns = 10 * kSecond};
  std::vector<Action> seen;
  for (int i = 0; i < 13; ++i) {
    Action action = check(receiver(8, 1));
    if (action == Action::kQuery) {
      ASSERT_TRUE(reply(sender(7, 0, ConnectionStatus::kSendRefused)));
      continue;
    }
    if (action != Action::kNone) seen.push_back(action);
    if (action == Action::kFail) break;
  }
  ASSERT_GE(seen.size(), 3U);
  EXPECT_EQ(seen.front(), Action::kSuspectCts);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), Action::kReport), 1);
  EXPECT_EQ(seen.back(), Action::kFail);
}

}  // namespace
}  // namespace verbatim
