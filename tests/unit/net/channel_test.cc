// One end of a channel; the test is the other end, and decides what time it is.
#include "channel/channel.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/socket.h"

namespace verbatim {
namespace {

using Change = Channel::Change;
using wire::MessageType;

constexpr std::uint64_t kMs = kNanosecondsPerMillisecond;

class ChannelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(loop_.open());
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      Result<UniqueFd> socket = tcp_listen(loopback(i + 1));
      ASSERT_TRUE(socket);
      peers_[i] = std::move(*socket);
      addresses_.push_back(wire::to_address(*local_address(peers_[i])));
    }
  }
  void TearDown() override {
    if (opened_) channel_.stop();
  }

  // 127.0.0.`number`, which Linux has on its loopback interface.
  static sockaddr_storage loopback(std::size_t number) {
    sockaddr_storage address{};
    auto& v4 = reinterpret_cast<sockaddr_in&>(address);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + static_cast<std::uint32_t>(number));
    return address;
  }

  // With the first `addresses` of the peer's.
  void open(bool connects, std::size_t addresses = 1) {
    Result<UniqueFd> own = tcp_connect(wire::to_sockaddr(addresses_[0]), {});
    ASSERT_TRUE(own);
    channel_.set_socket(std::move(*own));
    peer_ = accepted();
    const wire::ConnectionEnd end{.connection = {.secret = {}, .attempt = 7}, .connecting = connects ? 1U : 0U};
    ASSERT_TRUE(channel_.open(host_, {end, std::span(addresses_).first(addresses)}));
    opened_ = true;
  }

  static void eventually(const std::function<bool()>& is_so) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!is_so()) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      std::this_thread::yield();
    }
  }
  UniqueFd accepted(std::size_t peer = 0) {
    UniqueFd socket;
    eventually([&] {
      Result<std::optional<UniqueFd>> next = tcp_accept(peers_[peer]);
      if (next && *next) socket = std::move(**next);
      return !!socket;
    });
    return socket;
  }
  // Of a peer; the rest of the message is read, too. nullopt: the connection has ended, with `error_`.
  std::optional<MessageType> next(const UniqueFd& socket) {
    std::optional<MessageType> type;
    MessageStream stream;
    error_.reset();
    eventually([&] {
      const auto message = stream.receive(socket);
      if (!message) error_ = message.error().sys_errno;
      if (message && *message) type = (*message)->type;
      return type || error_;
    });
    return type;
  }
  static void say(const UniqueFd& socket, MessageType type) {
    MessageStream stream;
    ASSERT_TRUE(stream.send(socket, wire::Notice::without_body(type)));
  }
  // The channel's end of an attempt, until the peer has kResume.
  UniqueFd attempt(std::size_t peer = 0) {
    UniqueFd socket = accepted(peer);
    eventually([&] {
      EXPECT_EQ(channel_.ready(now_), Change::kNone);
      int bytes = 0;
      std::uint8_t byte = 0;
      bytes = static_cast<int>(::recv(socket.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT));
      return bytes == 1;
    });
    EXPECT_EQ(next(socket), MessageType::kResume);
    return socket;
  }
  Change change_of_attempt() {
    Change change = Change::kNone;
    eventually([&] { return (change = channel_.ready(now_)) != Change::kNone; });
    return change;
  }
  // A TCP connection that the listener has got for the channel.
  UniqueFd resumed(UniqueFd& own) {
    Result<UniqueFd> made = tcp_connect(wire::to_sockaddr(addresses_[0]), {});
    EXPECT_TRUE(made);
    own = accepted();
    return std::move(*made);
  }
  bool receives(MessageType type) {
    bool found = false;
    eventually([&] {
      const auto message = channel_.receive();
      found = message && *message && (*message)->type == type;
      return found || !message;
    });
    return found;
  }

  EventLoop loop_;
  EventHandler handler_{loop_, [](int) {}};
  std::vector<SocketInterface> interfaces_;
  Channel::Host host_{handler_, interfaces_};
  std::array<UniqueFd, 2> peers_;  // the peer's listening sockets
  std::vector<wire::Address> addresses_;
  Channel channel_;
  bool opened_ = false;
  UniqueFd peer_;
  std::uint64_t now_ = kNanosecondsPerSecond;
  std::optional<int> error_;
};

TEST_F(ChannelTest, ConnectingEnd_MakesItAgainAtOnce) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  const int key = channel_.key();
  ASSERT_TRUE(channel_.lose(now_));
  EXPECT_FALSE(channel_.is_open());
  EXPECT_FALSE(channel_.send_ping());
  EXPECT_EQ(channel_.due_ns(), now_);
  EXPECT_EQ(channel_.advance(now_), Change::kNone);
  const UniqueFd made = attempt();
  say(made, MessageType::kPing);
  EXPECT_EQ(change_of_attempt(), Change::kNew);
  EXPECT_EQ(channel_.key(), key);
  EXPECT_FALSE(channel_.is_being_made());
  EXPECT_EQ(channel_.due_ns(), kNever);
  EXPECT_EQ(next(peer_), std::nullopt) << "the old one has ended";
  EXPECT_EQ(error_, ECONNRESET) << "an end of file is the end of the process";
  EXPECT_TRUE(receives(MessageType::kPing)) << "the answer is a message, too";
  EXPECT_EQ(next(made), MessageType::kPong);
}

TEST_F(ChannelTest, AcceptingEnd_WaitsAtFirst) {
  ASSERT_NO_FATAL_FAILURE(open(false));
  ASSERT_TRUE(channel_.lose(now_));
  EXPECT_EQ(channel_.due_ns(), now_ + 50 * kMs);
  EXPECT_EQ(channel_.advance(now_), Change::kNone);
  EXPECT_EQ(channel_.due_ns(), now_ + 50 * kMs) << "no attempt has begun";
  UniqueFd peers;
  EXPECT_EQ(channel_.accept(resumed(peers), now_), Change::kNew);
  EXPECT_EQ(next(peers), MessageType::kPing) << "by which the peer knows that it is accepted";
}

TEST_F(ChannelTest, NoAnswerToAttempt_EndsWithResetAndIsRepeated) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  const UniqueFd first = attempt();
  now_ = channel_.due_ns();
  EXPECT_EQ(now_, 6 * kNanosecondsPerSecond) << "one address has 5 s";
  EXPECT_EQ(channel_.advance(now_), Change::kNone);
  EXPECT_EQ(next(first), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_GE(channel_.due_ns(), now_ + 100 * kMs);
  EXPECT_LT(channel_.due_ns(), now_ + 200 * kMs);
  now_ = channel_.due_ns();
  channel_.advance(now_);
  const UniqueFd second = attempt();
  say(second, MessageType::kFailed);  // the listener's answer for a connection that has ended
  EXPECT_EQ(change_of_attempt(), Change::kNew);
}

TEST_F(ChannelTest, BothEndsMakeIt_ConnectingEndPrefersItsOwnForAWhile) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  const UniqueFd own = attempt();
  UniqueFd peers;
  EXPECT_EQ(channel_.accept(resumed(peers), now_), Change::kNone);
  EXPECT_EQ(channel_.due_ns(), now_ + 5 * kMs);
  EXPECT_EQ(channel_.advance(now_ + 4 * kMs), Change::kNone);
  EXPECT_EQ(channel_.advance(now_ + 5 * kMs), Change::kNew);
  EXPECT_EQ(next(own), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_EQ(next(peers), MessageType::kPing);
}

TEST_F(ChannelTest, BothEndsMakeIt_OwnIsKeptWhenThePeerAnswers) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  const UniqueFd own = attempt();
  UniqueFd peers;
  EXPECT_EQ(channel_.accept(resumed(peers), now_), Change::kNone);
  say(own, MessageType::kPing);
  EXPECT_EQ(change_of_attempt(), Change::kNew);
  EXPECT_EQ(next(peers), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_TRUE(receives(MessageType::kPing));
}

TEST_F(ChannelTest, NothingListens_RefusalsAreCounted) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  peers_[0].reset();
  for (unsigned refusals = 1; refusals <= 3; ++refusals) {
    EXPECT_EQ(channel_.advance(now_), Change::kNone);
    eventually([&] {
      EXPECT_EQ(channel_.ready(now_), Change::kNone);
      return channel_.refusals() == refusals;
    });
    EXPECT_TRUE(channel_.is_refused());
    EXPECT_GT(channel_.due_ns(), now_);
    now_ = channel_.due_ns();
  }
}

TEST_F(ChannelTest, AttemptsAreLimited_EndsAfterSome) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  peers_[0].reset();
  channel_.limit_attempts();
  for (unsigned refusals = 1; refusals <= 9; ++refusals) {
    ASSERT_NE(channel_.due_ns(), kNever);
    now_ = channel_.due_ns();
    channel_.limit_attempts();  // only the first call counts
    channel_.advance(now_);
    eventually([&] {
      channel_.ready(now_);
      return channel_.refusals() == refusals;
    });
  }
  EXPECT_EQ(channel_.due_ns(), kNever);
}

TEST_F(ChannelTest, PeerDoesNotAnswer_MovesToItsOtherAddress) {
  ASSERT_NO_FATAL_FAILURE(open(true, 2));
  channel_.ask_for_answer(now_, false);
  EXPECT_EQ(channel_.expect_answer(now_), now_ + 100 * kMs);
  now_ += 100 * kMs;
  EXPECT_EQ(channel_.expect_answer(now_), now_);
  EXPECT_TRUE(channel_.is_open()) << "the peer may be slow";
  channel_.advance(now_);
  const UniqueFd made = attempt(1);
  EXPECT_TRUE(channel_.send_ping()) << "over the old one";
  EXPECT_EQ(next(peer_), MessageType::kPing);
  say(made, MessageType::kPing);
  EXPECT_EQ(change_of_attempt(), Change::kMoved);
  ASSERT_NE(channel_.path(), nullptr);
  EXPECT_EQ(wire::to_address(channel_.path()->peer), addresses_[1]);
}

TEST_F(ChannelTest, PeerAnswersBeforeItIsAsked_StaysWhereItIs) {
  ASSERT_NO_FATAL_FAILURE(open(true, 2));
  channel_.ask_for_answer(now_, true);
  EXPECT_EQ(channel_.expect_answer(now_), now_) << "its path is down";
  EXPECT_TRUE(channel_.is_being_made());
  EXPECT_EQ(next(peer_), MessageType::kPing);
  say(peer_, MessageType::kPong);
  EXPECT_TRUE(receives(MessageType::kPong));
  EXPECT_FALSE(channel_.is_being_made());
  EXPECT_FALSE(channel_.awaits_answer());
}

TEST_F(ChannelTest, ResetMeanwhile_IsNotAccepted) {
  ASSERT_NO_FATAL_FAILURE(open(false));
  ASSERT_TRUE(channel_.lose(now_));
  UniqueFd peers;
  UniqueFd made = resumed(peers);
  close_with_reset(peers);
  eventually([&] { return !is_established(made); });
  EXPECT_EQ(channel_.accept(std::move(made), now_), Change::kNone);
  EXPECT_TRUE(channel_.is_being_made());
}

TEST_F(ChannelTest, Stopped_IsNeitherReadNorMadeAgain) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  const UniqueFd made = attempt();
  channel_.stop();
  EXPECT_EQ(next(made), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_EQ(channel_.due_ns(), kNever);
  EXPECT_EQ(channel_.advance(now_ + kNanosecondsPerSecond), Change::kNone);
}

}  // namespace
}  // namespace verbatim
