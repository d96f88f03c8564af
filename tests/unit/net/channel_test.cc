// One end of a channel, where the test is the other end, or both ends. The test decides what time it is.
#include "channel/channel.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/socket.h"
#include "support/loopback.h"
#include "support/relay.h"
#include "unit/support/peer_socket.h"

namespace verbatim {
namespace {

using Change = Channel::Change;
using wire::MessageType;

constexpr std::uint64_t kRequest = 7;  // number
constexpr std::uint64_t kMs = kNanosecondsPerMillisecond;

std::vector<std::uint8_t> bytes_of(const wire::Notice& notice) {
  return {notice.bytes().begin(), notice.bytes().end()};
}

class ChannelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(loop_.open());
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      Result<UniqueFd> socket = tcp_listen(test::loopback(static_cast<std::uint32_t>(i + 1)));
      ASSERT_TRUE(socket);
      peers_[i] = std::move(*socket);
      addresses_.push_back(wire::to_address(*local_address(peers_[i])));
    }
  }
  void TearDown() override {
    if (opened_) channel_.stop();
  }

  // With the first `addresses` of the peer's.
  void open(bool connects, std::size_t addresses = 1) {
    Result<UniqueFd> own = tcp_connect(wire::to_sockaddr(addresses_[0]), {});
    ASSERT_TRUE(own);
    channel_.set_socket(std::move(*own), {});
    peer_ = test::PeerSocket(accepted(), connects ? 0 : 1);
    const wire::ConnectionEnd end{.connection = {.listen = {}, .attempt = 7}, .connecting = connects ? 1U : 0U};
    ASSERT_TRUE(channel_.open(process_, {end, std::span(addresses_).first(addresses)}));
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
  // The next message to the peer but kAck. nullopt: the connection has ended, with `error_`.
  std::optional<MessageType> next(test::PeerSocket& peer) {
    std::optional<MessageType> type = first(peer);
    while (type == MessageType::kAck) type = first(peer);
    return type;
  }
  // The same, also of kAck.
  std::optional<MessageType> first(test::PeerSocket& peer) {
    std::optional<MessageType> type;
    error_.reset();
    eventually([&] {
      const auto message = peer.receive();
      if (!message) error_ = message.error().sys_errno;
      if (message && *message) type = (*message)->type;
      return type || error_;
    });
    return type;
  }
  static void say(test::PeerSocket& peer, const wire::Notice& notice) { ASSERT_TRUE(peer.say(notice)); }
  static void say(test::PeerSocket& peer, MessageType type) { ASSERT_TRUE(peer.say(type)); }
  // The channel's end of an attempt, until the peer has kResume.
  test::PeerSocket attempt(std::size_t peer = 0) {
    UniqueFd socket = accepted(peer);
    eventually([&] {
      EXPECT_EQ(channel_.ready(now_), Change::kNone);
      int bytes = 0;
      std::uint8_t byte = 0;
      bytes = static_cast<int>(::recv(socket.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT));
      return bytes == 1;
    });
    return test::PeerSocket::asked(std::move(socket));
  }
  Change change_of_attempt() {
    Change change = Change::kNone;
    eventually([&] { return (change = channel_.ready(now_)) != Change::kNone; });
    return change;
  }
  // The peer has made the channel again, of which it has `own`.
  Change accept(test::PeerSocket& own) {
    UniqueFd made = resumed(own);
    return channel_.accept(std::move(made), kRequest, now_);
  }
  UniqueFd resumed(test::PeerSocket& own) {
    Result<UniqueFd> made = tcp_connect(wire::to_sockaddr(addresses_[0]), {});
    EXPECT_TRUE(made);
    own = test::PeerSocket(accepted(), peer_.own(), peer_.own(), kRequest);
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
  Channel::Process process_{handler_, interfaces_};
  std::array<UniqueFd, 2> peers_;  // the peer's listening sockets
  std::vector<wire::Address> addresses_;
  Channel channel_;
  bool opened_ = false;
  test::PeerSocket peer_;
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
  test::PeerSocket made = attempt();
  say(made, wire::Notice::ack({0, 0}));
  EXPECT_EQ(change_of_attempt(), Change::kNew);
  EXPECT_EQ(channel_.key(), key);
  EXPECT_FALSE(channel_.is_being_made());
  EXPECT_EQ(channel_.due_ns(), kNever);
  EXPECT_EQ(next(peer_), std::nullopt) << "the old one has ended";
  EXPECT_EQ(error_, ECONNRESET) << "an end of file is the end of the process";
  say(made, MessageType::kPing);
  EXPECT_TRUE(receives(MessageType::kPing));
  EXPECT_EQ(next(made), MessageType::kPong);
}

TEST_F(ChannelTest, AcceptingEnd_WaitsAtFirst) {
  ASSERT_NO_FATAL_FAILURE(open(false));
  ASSERT_TRUE(channel_.lose(now_));
  EXPECT_EQ(channel_.due_ns(), now_ + 50 * kMs);
  EXPECT_EQ(channel_.advance(now_), Change::kNone);
  EXPECT_EQ(channel_.due_ns(), now_ + 50 * kMs) << "no attempt has begun";
  test::PeerSocket peers;
  EXPECT_EQ(accept(peers), Change::kNew);
  EXPECT_EQ(first(peers), MessageType::kAck) << "by which the peer knows that it is accepted";
}

TEST_F(ChannelTest, NoAnswerToAttempt_EndsWithResetAndIsRepeated) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  test::PeerSocket first = attempt();
  now_ = channel_.due_ns();
  EXPECT_EQ(now_, 6 * kNanosecondsPerSecond) << "one address has 5 s";
  EXPECT_EQ(channel_.advance(now_), Change::kNone);
  EXPECT_EQ(next(first), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_GE(channel_.due_ns(), now_ + 100 * kMs);
  EXPECT_LT(channel_.due_ns(), now_ + 200 * kMs);
  now_ = channel_.due_ns();
  channel_.advance(now_);
  test::PeerSocket second = attempt();
  say(second, MessageType::kFailed);  // the listener's answer for a connection that has ended
  EXPECT_EQ(change_of_attempt(), Change::kNew);
}

TEST_F(ChannelTest, BothEndsMakeIt_ConnectingEndPrefersItsOwnForAWhile) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  test::PeerSocket own = attempt();
  test::PeerSocket peers;
  EXPECT_EQ(accept(peers), Change::kNone);
  EXPECT_EQ(channel_.due_ns(), now_ + 5 * kMs);
  EXPECT_EQ(channel_.advance(now_ + 4 * kMs), Change::kNone);
  EXPECT_EQ(channel_.advance(now_ + 5 * kMs), Change::kNew);
  EXPECT_EQ(next(own), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_EQ(first(peers), MessageType::kAck);
}

TEST_F(ChannelTest, BothEndsMakeIt_OwnIsKeptWhenThePeerAnswers) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  test::PeerSocket own = attempt();
  test::PeerSocket peers;
  EXPECT_EQ(accept(peers), Change::kNone);
  say(own, wire::Notice::ack({0, 0}));
  EXPECT_EQ(change_of_attempt(), Change::kNew);
  EXPECT_EQ(next(peers), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_TRUE(receives(MessageType::kAck));
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

// The socket of the attempt stays readable, so waiting for the rest would keep the loop busy.
TEST_F(ChannelTest, AttemptEndsWithinAMessage_IsGivenUpAtOnce) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  for (const std::size_t bytes : {std::size_t{4}, wire::kHeaderBytes, wire::kHeaderBytes + sizeof(wire::Ack) + 1}) {
    channel_.advance(now_);
    test::PeerSocket made = attempt();
    const std::vector<std::uint8_t> ack = made.next_bytes(wire::Notice::ack({}).bytes());
    ASSERT_EQ(::send(made.socket().get(), ack.data(), bytes, 0), static_cast<ssize_t>(bytes));
    made.reset();
    eventually([&] {
      EXPECT_EQ(channel_.ready(now_), Change::kNone);
      return channel_.due_ns() < now_ + kNanosecondsPerSecond;
    });
    now_ = channel_.due_ns();
  }
}

// TCP may divide the answer, and the messages behind it.
TEST_F(ChannelTest, AnswerInParts_IsAcceptedWhenItIsWhole) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  test::PeerSocket made = attempt();
  const int socket = made.socket().get();
  const auto send = [&](std::span<const std::uint8_t> part) {
    ASSERT_EQ(::send(socket, part.data(), part.size(), 0), static_cast<ssize_t>(part.size()));
    eventually([&] {  // until it is at the other end
      int bytes = 0;
      return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes == 0;
    });
  };
  const std::vector<std::uint8_t> ack = made.next_bytes(wire::Notice::ack({}).bytes());
  const std::vector<std::uint8_t> ping = made.next_bytes(bytes_of(wire::Notice::without_body(MessageType::kPing)));
  std::size_t sent = 0;
  for (const std::size_t end : {std::size_t{5}, wire::kHeaderBytes, wire::kHeaderBytes + 5, ack.size() - 1}) {
    send(std::span(ack).subspan(sent, end - sent));
    sent = end;
    EXPECT_EQ(channel_.ready(now_), Change::kNone);
    EXPECT_EQ(channel_.due_ns(), now_ + 5 * kNanosecondsPerSecond) << "it is not given up";
  }
  send(std::span(ack).subspan(sent));
  EXPECT_EQ(channel_.ready(now_), Change::kNew);
  EXPECT_TRUE(receives(MessageType::kAck));
  send(std::span(ping).first(5));
  const auto part = channel_.receive();
  EXPECT_TRUE(part && !*part);
  send(std::span(ping).subspan(5));
  EXPECT_TRUE(receives(MessageType::kPing));
}

// Another process has sent a request that it has read before it came.
TEST_F(ChannelTest, EndsBeforeAMessageOfThePeer_IsAnErrorOfTheNetwork) {
  for (const char* bytes : {"", "SSH-2.0-OpenSSH_9.6"}) {
    ASSERT_NO_FATAL_FAILURE(open(true));
    test::PeerSocket others;
    EXPECT_EQ(accept(others), Change::kNew);
    EXPECT_EQ(first(others), MessageType::kAck);  // otherwise the close would reset it
    ASSERT_EQ(::send(others.socket().get(), bytes, std::strlen(bytes), 0), static_cast<ssize_t>(std::strlen(bytes)));
    others.reset();
    std::optional<int> error;
    eventually([&] {
      if (const auto message = channel_.receive(); !message) error = message.error().sys_errno;
      return error.has_value();
    });
    EXPECT_EQ(error, ECONNRESET);
    channel_.stop();
    opened_ = false;
  }
}

TEST_F(ChannelTest, LostSoonAfterItWasMade_IsNotMadeAgainAtOnce) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  test::PeerSocket peers;
  EXPECT_EQ(accept(peers), Change::kNew);
  ASSERT_TRUE(channel_.lose(now_));
  EXPECT_EQ(channel_.due_ns(), now_ + 100 * kMs);
  EXPECT_EQ(next(peers), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET) << "it may not have noticed";
}

// Another process has the peer's address, or has recorded an earlier answer.
TEST_F(ChannelTest, AnswerHasAWrongMac_AttemptIsGivenUp) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  std::vector<std::uint8_t> recorded;
  for (int i = 0; i < 2; ++i) {
    channel_.advance(now_);
    test::PeerSocket made = attempt();
    std::vector<std::uint8_t> answer = std::exchange(recorded, made.next_bytes(wire::Notice::ack({}).bytes()));
    if (answer.empty()) answer = wire::with_mac({recorded.begin(), recorded.end() - wire::kMacBytes}, wire::Key{1});
    ASSERT_GT(::send(made.socket().get(), answer.data(), answer.size(), 0), 0);
    eventually([&] {
      EXPECT_EQ(channel_.ready(now_), Change::kNone);
      return channel_.due_ns() < now_ + kNanosecondsPerSecond;
    });
    EXPECT_EQ(next(made), std::nullopt);
    EXPECT_EQ(error_, ECONNRESET);
    now_ = channel_.due_ns();
  }
  EXPECT_TRUE(channel_.is_being_made());
}

TEST_F(ChannelTest, MessageIsNotThePeersNext_IsNotTaken) {
  using Bytes = std::vector<std::uint8_t>;
  const Bytes ping = bytes_of(wire::Notice::without_body(MessageType::kPing));
  const auto send = [&](const Bytes& bytes) {
    ASSERT_EQ(::send(peer_.socket().get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  };
  const std::pair<const char*, std::function<Bytes()>> attacks[] = {
      {"it has no MAC", [&] { return ping; }},
      {"a byte is another",
       [&] {
         Bytes bytes = peer_.next_bytes(wire::Notice::ack({}).bytes());
         bytes[wire::kHeaderBytes] ^= 1;
         return bytes;
       }},
      {"it has come before",
       [&] {
         Bytes bytes = peer_.next_bytes(ping);
         send(bytes);
         EXPECT_TRUE(receives(MessageType::kPing));
         return bytes;
       }},
      {"the one before it is left out", [&] { return peer_.next_bytes(ping), peer_.next_bytes(ping); }},
      {"it is of another TCP connection", [&] { return test::PeerSocket({}, 0, 1, kRequest).next_bytes(ping); }},
      {"this end has sent it", [&] { return test::PeerSocket({}, 1).next_bytes(ping); }},
  };
  for (const auto& [what, attack] : attacks) {
    SCOPED_TRACE(what);
    ASSERT_NO_FATAL_FAILURE(open(true));
    send(attack());
    std::optional<int> error;
    eventually([&] {
      const auto message = channel_.receive();
      if (!message) error = message.error().sys_errno;
      return error || (message && *message);
    });
    EXPECT_EQ(error, EBADMSG);
    channel_.stop();
    opened_ = false;
  }
}

TEST_F(ChannelTest, PeerDoesNotAnswer_MovesToItsOtherAddress) {
  ASSERT_NO_FATAL_FAILURE(open(true, 2));
  channel_.ask_for_answer(now_, false);
  EXPECT_EQ(channel_.expect_answer(now_), now_ + 100 * kMs);
  now_ += 100 * kMs;
  EXPECT_EQ(channel_.expect_answer(now_), now_);
  EXPECT_TRUE(channel_.is_open()) << "the peer may be slow";
  channel_.advance(now_);
  test::PeerSocket made = attempt(1);
  EXPECT_TRUE(channel_.send_ping()) << "over the old one";
  EXPECT_EQ(next(peer_), MessageType::kPing);
  say(made, wire::Notice::ack({0, 0}));
  EXPECT_EQ(change_of_attempt(), Change::kMoved);
  ASSERT_TRUE(channel_.path());
  EXPECT_EQ(wire::to_address(channel_.path()->peer), addresses_[1]);
}

// A firewall between the hosts may have forgotten the TCP connection.
TEST_F(ChannelTest, NothingComesFromTheOnlyAddress_MovesToAnotherConnection) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  EXPECT_FALSE(channel_.may_be_made());
  channel_.move(now_);
  EXPECT_TRUE(channel_.is_open());
  channel_.advance(now_);
  EXPECT_TRUE(channel_.may_be_made());
  test::PeerSocket made = attempt();
  channel_.move(now_);  // it moves already
  say(made, wire::Notice::ack({0, 0}));
  EXPECT_EQ(change_of_attempt(), Change::kMoved);
  EXPECT_FALSE(channel_.is_being_made());
}

// What was asked on the connection before it does not count.
TEST_F(ChannelTest, PeerAnswersOnANewConnection_DoesNotMove) {
  ASSERT_NO_FATAL_FAILURE(open(false, 2));
  EXPECT_TRUE(channel_.send_ping());
  channel_.ask_for_answer(now_, false);
  test::PeerSocket peers;
  EXPECT_EQ(accept(peers), Change::kNew);
  channel_.move(now_);
  EXPECT_TRUE(channel_.send_ping());
  say(peers, MessageType::kPong);
  EXPECT_TRUE(receives(MessageType::kPong));
  EXPECT_FALSE(channel_.is_being_made());
}

TEST_F(ChannelTest, NothingListensAtTheOnlyAddress_CannotBeMade) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  peers_[0].reset();
  channel_.move(now_);
  channel_.advance(now_);
  eventually([&] {
    channel_.ready(now_);
    return !channel_.may_be_made();
  });
  EXPECT_TRUE(channel_.is_being_made()) << "it is tried again";
}

TEST_F(ChannelTest, HasJustBeenMade_DoesNotMoveAtOnce) {
  ASSERT_NO_FATAL_FAILURE(open(false, 2));
  test::PeerSocket peers;
  EXPECT_EQ(accept(peers), Change::kNew);
  now_ += 999 * kMs;
  channel_.ask_for_answer(now_, true);
  EXPECT_EQ(channel_.expect_answer(now_), now_ + 100 * kMs);
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
  EXPECT_FALSE(channel_.may_be_made());
}

TEST_F(ChannelTest, ResetMeanwhile_IsNotAccepted) {
  ASSERT_NO_FATAL_FAILURE(open(false));
  ASSERT_TRUE(channel_.lose(now_));
  test::PeerSocket peers;
  UniqueFd made = resumed(peers);
  peers.close_with_reset();
  eventually([&] { return !is_established(made); });
  EXPECT_EQ(channel_.accept(std::move(made), kRequest, now_), Change::kNone);
  EXPECT_TRUE(channel_.is_being_made());
}

TEST_F(ChannelTest, Stopped_IsNeitherReadNorMadeAgain) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  test::PeerSocket made = attempt();
  channel_.stop();
  EXPECT_EQ(next(made), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_EQ(channel_.due_ns(), kNever);
  EXPECT_EQ(channel_.advance(now_ + kNanosecondsPerSecond), Change::kNone);
}

// A message that must arrive.
wire::Notice numbered(std::uint32_t number) {
  return wire::Notice::lane_down({.lane = 0, .round = number});
}

constexpr std::size_t kLongBytes = 40'000;

// The same, with bytes behind it.
std::vector<std::uint8_t> long_message(std::uint32_t number, std::size_t bytes) {
  std::vector<std::uint8_t> message = bytes_of(numbered(number));
  message.resize(message.size() + bytes, static_cast<std::uint8_t>(number));
  wire::put_header(std::span(message).first<wire::kHeaderBytes>(), MessageType::kLaneDown,
                   message.size() - wire::kHeaderBytes);
  return message;
}

TEST_F(ChannelTest, LostBeforeAcknowledged_IsSentAgainWithItsNumber) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(channel_.send(numbered(i)));
  say(peer_, wire::Notice::ack({1, 0}));
  EXPECT_TRUE(receives(MessageType::kAck));
  ASSERT_TRUE(channel_.lose(now_));
  EXPECT_TRUE(channel_.send(numbered(3))) << "it is kept until the channel is there again";
  channel_.advance(now_);
  test::PeerSocket made = attempt();
  say(made, wire::Notice::ack({}));
  EXPECT_EQ(change_of_attempt(), Change::kNew);
  std::optional<wire::Ack> ack;
  for (std::uint32_t expected = 1; expected < 4;) {
    std::optional<wire::LaneDown> down;
    eventually([&] {
      const auto message = made.receive();
      if (message && *message && (*message)->type == MessageType::kAck) ack = wire::decode<wire::Ack>((*message)->body);
      if (message && *message && (*message)->type == MessageType::kLaneDown) {
        down = wire::decode<wire::LaneDown>((*message)->body);
      }
      return !message || down;
    });
    ASSERT_TRUE(ack && down);
    EXPECT_EQ(ack->number, expected);
    EXPECT_EQ(down->round, expected++);
  }
  say(made, wire::Notice::ack({4, 0}));
  eventually([&] { return !channel_.receive() || channel_.unacknowledged() == 0; });
  EXPECT_EQ(channel_.unacknowledged(), 0U);
}

TEST_F(ChannelTest, PeerAcknowledgesNothing_RoomEndsButFailureAndCloseAreTaken) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  std::uint32_t sent = 0;
  for (; channel_.has_room(); ++sent) ASSERT_TRUE(channel_.send(numbered(sent)));
  EXPECT_GE(sent, 30U);
  EXPECT_TRUE(channel_.send(wire::Notice::failed(ErrorKind::kRemote, "why")));
  EXPECT_TRUE(channel_.send(wire::Notice::without_body(MessageType::kClose)));
  say(peer_, wire::Notice::ack({4, 0}));
  EXPECT_TRUE(receives(MessageType::kAck));
  EXPECT_TRUE(channel_.has_room());
}

TEST_F(ChannelTest, SentAgainOnTheNewOne_IsNotTakenTwice) {
  ASSERT_NO_FATAL_FAILURE(open(true, 2));
  channel_.ask_for_answer(now_, true);
  channel_.expect_answer(now_);
  channel_.advance(now_);
  test::PeerSocket made = attempt(1);
  say(peer_, wire::Notice::ack({}));
  say(peer_, numbered(0));
  EXPECT_TRUE(receives(MessageType::kLaneDown));
  say(made, wire::Notice::ack({}));
  EXPECT_EQ(change_of_attempt(), Change::kMoved);
  say(made, numbered(0));
  say(made, wire::Notice::failed(ErrorKind::kRemote, "why"));
  EXPECT_TRUE(receives(MessageType::kAck));
  std::optional<MessageType> type;
  eventually([&] {
    const auto message = channel_.receive();
    if (message && *message) type = (*message)->type;
    return !message || type;
  });
  EXPECT_EQ(type, MessageType::kFailed);
}

// Otherwise the peer keeps it.
TEST_F(ChannelTest, MessageOfThePeer_IsAcknowledged) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  say(peer_, wire::Notice::ack({}));
  say(peer_, numbered(0));
  EXPECT_TRUE(receives(MessageType::kLaneDown));
  EXPECT_TRUE(channel_.flush());
  say(peer_, MessageType::kPing);
  EXPECT_TRUE(receives(MessageType::kPing));
  EXPECT_EQ(first(peer_), MessageType::kAck);
  EXPECT_EQ(first(peer_), MessageType::kPong) << "one is enough";
}

TEST_F(ChannelTest, OneOfTwoIsAcknowledged_NothingIsSentAgain) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  for (std::uint32_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(channel_.send(numbered(i)));
    EXPECT_EQ(next(peer_), MessageType::kLaneDown);
  }
  say(peer_, wire::Notice::ack({1, 0}));
  EXPECT_TRUE(receives(MessageType::kAck));
  EXPECT_TRUE(channel_.flush());
  EXPECT_TRUE(channel_.send_ping());
  EXPECT_EQ(first(peer_), MessageType::kPing);
}

// The new path may lose everything without an error.
TEST_F(ChannelTest, SentAgainOnTheNewOne_AnswerIsAwaited) {
  ASSERT_NO_FATAL_FAILURE(open(true, 2));
  EXPECT_TRUE(channel_.send(numbered(0)));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  test::PeerSocket made = attempt();
  say(made, wire::Notice::ack({}));
  EXPECT_EQ(change_of_attempt(), Change::kNew);
  EXPECT_EQ(channel_.expect_answer(now_), now_ + 100 * kMs);
  EXPECT_EQ(first(made), MessageType::kAck) << "by which the peer knows that it is accepted";
}

// It knows only the last message of the connection, and no number.
TEST_F(ChannelTest, ListenerAnswersForAConnectionThatHasEnded_IsTaken) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  say(peer_, wire::Notice::ack({}));
  say(peer_, numbered(0));
  EXPECT_TRUE(receives(MessageType::kLaneDown));
  say(peer_, wire::Notice::ack({}));  // what comes next is a repeat, and is lost with the TCP connection
  EXPECT_TRUE(receives(MessageType::kAck));
  ASSERT_TRUE(channel_.lose(now_));
  channel_.advance(now_);
  test::PeerSocket made = attempt();
  say(made, MessageType::kClose);
  EXPECT_EQ(change_of_attempt(), Change::kNew);
  EXPECT_TRUE(receives(MessageType::kClose));
}

TEST_F(ChannelTest, ImpossibleAcknowledgement_IsAProtocolError) {
  const auto error_of = [&](const wire::Ack& ack) {
    say(peer_, wire::Notice::ack(ack));
    std::optional<int> error;
    eventually([&] {
      const auto message = channel_.receive();
      if (message && *message) error = 0;
      if (!message) error = message.error().sys_errno;
      return error.has_value();
    });
    return error;
  };
  ASSERT_NO_FATAL_FAILURE(open(true));
  EXPECT_TRUE(channel_.send(numbered(0)));
  EXPECT_EQ(error_of({1, 0}), 0);
  EXPECT_EQ(error_of({0, 0}), 0) << "an earlier one, which came late";
  EXPECT_EQ(error_of({2, 0}), EPROTO) << "more than was sent";
  channel_.stop();
  ASSERT_NO_FATAL_FAILURE(open(true));
  EXPECT_EQ(error_of({1, 1}), EPROTO) << "a message is left out";
}

TEST_F(ChannelTest, MessageIsLongerThanTheLimit_IsAProtocolError) {
  ASSERT_NO_FATAL_FAILURE(open(true));
  ASSERT_TRUE(peer_.say(long_message(0, wire::kMaxNoticeBody)));
  std::optional<int> error;
  eventually([&] {
    if (const auto message = channel_.receive(); !message) error = message.error().sys_errno;
    return error.has_value();
  });
  EXPECT_EQ(error, EPROTO);
}

// Two channels; the test is the network between them, and their listeners.
class ChannelPair : public ::testing::Test {
 protected:
  struct Resuming {
    UniqueFd socket;
    std::array<std::uint8_t, wire::kHeaderBytes + sizeof(wire::Resume) + wire::kMacBytes> message{};
    std::size_t filled = 0;
  };
  struct End {
    EventLoop loop;
    EventHandler handler{loop, [](int) {}};
    std::vector<SocketInterface> interfaces;
    Channel::Process process{handler, interfaces};
    std::array<UniqueFd, 2> listening;
    std::vector<wire::Address> addresses;
    std::vector<Resuming> resuming;
    Channel channel{sizeof(wire::LaneDown) + kLongBytes};
    std::uint32_t sent = 0;
    std::uint32_t received = 0;
    bool has_ended = false;
  };

  // With a relay, all TCP connections go over it.
  void open(test::Relay* relay = nullptr) {
    for (std::size_t end = 0; end < ends_.size(); ++end) {
      ends_[end] = std::make_unique<End>();
      ASSERT_TRUE(ends_[end]->loop.open());
      for (std::size_t i = 0; i < ends_[end]->listening.size(); ++i) {
        Result<UniqueFd> socket = tcp_listen(test::loopback(static_cast<std::uint32_t>(i + 1)));
        ASSERT_TRUE(socket);
        ends_[end]->listening[i] = std::move(*socket);
        ends_[end]->addresses.push_back(wire::to_address(*local_address(ends_[end]->listening[i])));
      }
      std::vector<wire::Address>& addresses = ends_[end]->addresses;
      if (relay != nullptr) addresses = {wire::to_address(relay->add(end, wire::to_sockaddr(addresses[0])))};
    }
    Result<UniqueFd> own = tcp_connect(wire::to_sockaddr(ends_[1]->addresses[0]), {});
    ASSERT_TRUE(own);
    ends_[0]->channel.set_socket(std::move(*own), {});
    if (relay != nullptr) relay->pass_on();
    Result<std::optional<UniqueFd>> accepted = tcp_accept(ends_[1]->listening[0]);
    ASSERT_TRUE(accepted && *accepted);
    ends_[1]->channel.set_socket(std::move(**accepted), {});
    for (std::size_t i = 0; i < 2; ++i) {
      const wire::ConnectionEnd end{.connection = {.listen = {}, .attempt = 7}, .connecting = i == 0 ? 1U : 0U};
      ASSERT_TRUE(ends_[i]->channel.open(ends_[i]->process, {end, ends_[1 - i]->addresses}));
    }
  }
  void close() {
    for (const std::unique_ptr<End>& end : ends_) end->channel.stop();
  }

  void serve(End& end) {
    for (const UniqueFd& listening : end.listening) {
      for (Result<std::optional<UniqueFd>> next = tcp_accept(listening); next && *next; next = tcp_accept(listening)) {
        end.resuming.emplace_back().socket = std::move(**next);
      }
    }
    for (Resuming& one : std::exchange(end.resuming, {})) {
      const Result<bool> whole = receive_into(one.socket, one.message, one.filled);
      if (!whole) continue;
      if (!*whole || random_() % 4 == 0) {  // the listener is late
        end.resuming.push_back(std::move(one));
      } else {
        const auto resume =
            wire::decode_resume(std::span(one.message).subspan(wire::kHeaderBytes, sizeof(wire::Resume)));
        ASSERT_TRUE(resume);
        EXPECT_NE(end.channel.accept(std::move(one.socket), resume->number, now_), Change::kBroken);
      }
    }
    end.channel.ready(now_);
    while (end.channel.is_open() && !end.has_ended) {
      const auto message = end.channel.receive();
      if (!message) {
        const int error = message.error().sys_errno;
        EXPECT_TRUE(error != 0 && error != EPROTO && error != EBADMSG) << error;
        end.has_ended = error == 0 || error == EPROTO;
        if (!end.has_ended) {
          EXPECT_TRUE(end.channel.lose(now_));
        }
        break;
      }
      if (!*message) break;
      if ((*message)->type != MessageType::kLaneDown) continue;
      const std::span<const std::uint8_t> body = (*message)->body;
      EXPECT_EQ(wire::decode<wire::LaneDown>(body.first(sizeof(wire::LaneDown)))->round, end.received)
          << "once and in order";
      const std::span<const std::uint8_t> rest = body.subspan(sizeof(wire::LaneDown));
      const auto value = static_cast<std::uint8_t>(end.received);
      EXPECT_TRUE(std::ranges::all_of(rest, [&](std::uint8_t byte) { return byte == value; }));
      ++end.received;
    }
    end.channel.expect_answer(now_);
    end.channel.advance(now_);
    end.channel.flush();
  }
  bool all_received() const { return ends_[0]->received == ends_[1]->sent && ends_[1]->received == ends_[0]->sent; }

  std::array<std::unique_ptr<End>, 2> ends_;
  std::mt19937 random_;
  std::uint64_t now_ = kNanosecondsPerSecond;
};

// It is reset by either end and moves at random moments, by both ends at once, too.
TEST_F(ChannelPair, ResetsAndMovesAtAnyMoment_EachMessageArrivesOnceAndInOrder) {
  std::size_t messages = 0;
  std::size_t parts = 0;  // messages that the socket did not accept at once
  for (unsigned seed = 1; seed <= 300 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    random_.seed(seed);
    const auto below = [&](unsigned number) { return static_cast<unsigned>(random_() % number); };
    ASSERT_NO_FATAL_FAILURE(open());
    for (int step = 0; step < 100; ++step) {
      End& end = *ends_[below(2)];
      now_ += below(3) == 0 ? below(60) * kMs : 0;
      const unsigned event = below(20);
      constexpr int kSmall = 4096;  // bytes that a socket takes
      ::setsockopt(end.channel.socket().get(), SOL_SOCKET, SO_SNDBUF, &kSmall, sizeof kSmall);
      if (event < 10 && end.channel.has_room()) {
        ASSERT_TRUE(below(8) == 0 ? end.channel.send(long_message(end.sent, below(kLongBytes)))
                                  : end.channel.send(numbered(end.sent)));
        ++end.sent;
        parts += end.channel.has_unsent() ? 1U : 0U;
      } else if (event == 10) {
        reset_connection(end.channel.socket());
      } else if (event == 11) {
        end.channel.ask_for_answer(now_, true);
      }
      for (unsigned passes = below(3); passes > 0; --passes) serve(*ends_[below(2)]);
    }
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!all_received() && !HasFailure() && std::chrono::steady_clock::now() < limit) {
      now_ += kMs;
      for (const std::unique_ptr<End>& end : ends_) serve(*end);
    }
    EXPECT_TRUE(all_received());
    messages += ends_[0]->sent + ends_[1]->sent;
    close();
  }
  EXPECT_GT(messages, 10'000U);
  EXPECT_GT(parts, 0U);
}

// Each end sends some messages, and the TCP connection is made again once more.
TEST_F(ChannelPair, CutAfterAnyByte_EachMessageArrivesOnceAndInOrder) {
  constexpr std::uint32_t kMessages = 2;  // of each end
  constexpr int kRounds = 200;            // 4 s: no attempt has to be given up
  for (const std::size_t from : {0U, 1U}) {
    std::size_t bytes = 1;
    for (bool has_cut = true; has_cut && !HasFailure(); ++bytes) {
      SCOPED_TRACE("cut after byte " + std::to_string(bytes) + " of end " + std::to_string(from));
      test::Relay relay;
      ASSERT_NO_FATAL_FAILURE(open(&relay));
      relay.cut_after(from, bytes);
      const auto all_acknowledged = [&] {
        return all_received() && ends_[0]->channel.unacknowledged() + ends_[1]->channel.unacknowledged() == 0;
      };
      for (int round = 0; round < kRounds && (ends_[0]->sent < kMessages || !all_acknowledged()); ++round) {
        for (const std::unique_ptr<End>& end : ends_) {
          if (end->sent < kMessages && round % 2 == 0) {
            EXPECT_TRUE(end->channel.send(numbered(end->sent++)));
          }
          relay.pass_on();
          serve(*end);
        }
        if (round == 1) relay.cut();
        now_ += 20 * kMs;
      }
      EXPECT_TRUE(all_acknowledged());
      has_cut = relay.has_cut();
      close();
    }
    EXPECT_GT(bytes, 200U);
  }
}

}  // namespace
}  // namespace verbatim
