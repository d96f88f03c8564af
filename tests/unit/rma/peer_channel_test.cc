// The channel of a rank; the test is the other rank.
#include "rma/peer_channel.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/socket.h"
#include "channel/listener.h"
#include "support/loopback.h"
#include "unit/support/peer_socket.h"

namespace verbatim::rma {
namespace {

using End = PeerChannel::End;
using wire::MessageType;

std::vector<std::uint8_t> exchange(std::uint32_t sequence) {
  return wire::encode_rma_exchange({.call = wire::RmaCall::kRegister, .sequence = sequence, .body = {}});
}

class PeerChannelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Monitor>> monitor = Monitor::start({});
    ASSERT_TRUE(monitor);
    monitor_ = std::move(*monitor);
    monitor_->set_listener(listener_);
    Result<UniqueFd> listening = tcp_listen(test::loopback());
    ASSERT_TRUE(listening);
    listening_ = std::move(*listening);
    address_ = wire::to_address(*local_address(listening_));
  }
  void TearDown() override { channel_.reset(); }

  void make(std::uint64_t max_loss_ns = 10 * kNanosecondsPerSecond) {
    process_ = std::make_unique<PeerChannel::Process>(PeerChannel::Process{
        .monitor = *monitor_, .listener = listener_, .interfaces = interfaces_, .max_loss_ns = max_loss_ns});
    Result<UniqueFd> own = tcp_connect(*local_address(listening_), {});
    ASSERT_TRUE(own);
    eventually([&] {
      Result<std::optional<UniqueFd>> next = tcp_accept(listening_);
      if (next && *next) peer_ = test::PeerSocket(std::move(**next), 0);
      return !!peer_;
    });
    channel_ = std::make_unique<PeerChannel>(*process_, std::move(*own), own_, wire::Key{}, std::vector{address_});
  }
  void open(std::uint64_t max_loss_ns = 10 * kNanosecondsPerSecond) {
    make(max_loss_ns);
    channel_->open([] {});
  }

  static void eventually(const std::function<bool()>& is_so) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!is_so()) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      std::this_thread::yield();
    }
  }
  void await(End end) {
    eventually([&] { return channel_->end() != End::kOpen; });
    EXPECT_EQ(channel_->end(), end) << channel_->reason();
  }
  void say(std::span<const std::uint8_t> message) { ASSERT_TRUE(peer_.say(message)); }
  void say(const wire::Notice& notice) { say(notice.bytes()); }
  // The channel makes the TCP connection again.
  void accept_attempt() {
    UniqueFd attempt;
    eventually([&] {
      Result<std::optional<UniqueFd>> next = tcp_accept(listening_);
      if (next && *next) attempt = std::move(**next);
      return !!attempt;
    });
    if (attempt) peer_ = test::PeerSocket::asked(std::move(attempt));
  }
  // Of the messages that the other rank gets the next one.
  MessageType next() {
    std::optional<MessageType> type;
    eventually([&] {
      const auto message = peer_.receive();
      if (!message) ADD_FAILURE() << to_string(message.error());
      if (message && *message) type = (*message)->type;
      return !message || type;
    });
    return type.value_or(MessageType::kReject);
  }

  // The next message is an acknowledgement. Returns of how many messages.
  std::uint64_t next_ack() {
    std::optional<wire::Ack> ack;
    eventually([&] {
      const auto message = peer_.receive();
      if (message && *message && (*message)->type == MessageType::kAck) ack = wire::decode<wire::Ack>((*message)->body);
      return !message || *message;
    });
    return ack ? ack->received : UINT64_MAX;
  }

  const wire::ConnectionEnd own_{.connection = {.listen = {{1}}, .attempt = 7}, .connecting = 1};
  Listener listener_{test::loopback()};
  std::unique_ptr<Monitor> monitor_;  // ends before the listener
  std::vector<SocketInterface> interfaces_;
  std::unique_ptr<PeerChannel::Process> process_;
  UniqueFd listening_;
  wire::Address address_;
  test::PeerSocket peer_;
  std::unique_ptr<PeerChannel> channel_;
};

TEST_F(PeerChannelTest, ConnectionHasEndedBeforeOpen_ListenerForgetsTheChannel) {
  for (int i = 0; i < 100; ++i) {
    make();
    peer_.reset();
    channel_->open([] {});
    await(End::kEnded);
    eventually([&] { return !listener_.has_connections(); });
    channel_.reset();
  }
}

TEST_F(PeerChannelTest, ResetAndNothingListens_IsLost) {
  open();
  listening_.reset();
  peer_.close_with_reset();
  await(End::kEnded);
  EXPECT_NE(channel_->reason().find(", and a new TCP connection was refused"), std::string::npos) << channel_->reason();
}

TEST_F(PeerChannelTest, ResetAndNothingIsWaitedFor_IsLost) {
  open(0);
  say(exchange(0));
  eventually([&] { return channel_->take().has_value(); });
  peer_.close_with_reset();
  await(End::kLost);
  EXPECT_NE(channel_->reason().find(", and no new TCP connection could be made within 0"), std::string::npos)
      << channel_->reason();
}

// Something between the hosts has changed it.
TEST_F(PeerChannelTest, MessageHasAWrongMac_ChannelIsMadeAgain) {
  open();
  std::vector<std::uint8_t> bytes = peer_.next_bytes(exchange(0));
  bytes.back() ^= 1;
  ASSERT_GT(::send(peer_.socket().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
  accept_attempt();
  say(wire::Notice::ack({0, 0}));
  say(exchange(0));
  eventually([&] { return channel_->take().has_value(); });
  EXPECT_EQ(channel_->end(), End::kOpen);
}

// Otherwise it would be made again and again until a late rank serves it.
TEST_F(PeerChannelTest, NothingHasComeFromTheRank_ItIsNotAskedForAnAnswer) {
  interfaces_.resize(2);  // so that the channel could move
  open();
  channel_->send(exchange(0));
  EXPECT_EQ(next(), MessageType::kAck);
  EXPECT_EQ(next(), MessageType::kExchange);
  say(wire::Notice::ack({1, 0}));
  say(exchange(0));
  eventually([&] { return channel_->take().has_value(); });
  channel_->send(exchange(1));
  EXPECT_EQ(next(), MessageType::kPing);
}

// A set-up would otherwise have as many acknowledgements as messages.
TEST_F(PeerChannelTest, MessageOfTheRank_IsAcknowledgedWithTheNextOneToIt) {
  open();
  say(wire::Notice::ack({0, 0}));
  say(exchange(0));
  eventually([&] { return channel_->take().has_value(); });
  channel_->send(exchange(0));
  EXPECT_EQ(next_ack(), 1U);
  EXPECT_EQ(next(), MessageType::kExchange);
}

// The rank keeps them until then.
TEST_F(PeerChannelTest, ManyMessagesOfTheRank_AreAcknowledged) {
  open();
  say(wire::Notice::ack({0, 0}));
  for (int i = 0; i < 64; ++i) say(wire::encode_rma_lane({}));
  EXPECT_EQ(next_ack(), 64U);
}

// As when the handshake fails with another rank.
TEST_F(PeerChannelTest, WasNotOpened_RankThatResumesLearnsThatItHasEnded) {
  listener_.addresses(Listener::Use::kHold);
  make();
  channel_.reset();
  const std::vector<wire::Address> addresses = listener_.addresses(Listener::Use::kLook);
  ASSERT_FALSE(addresses.empty());
  Result<UniqueFd> socket = tcp_connect(wire::to_sockaddr(addresses.front()), {});
  ASSERT_TRUE(socket);
  const wire::Notice request = wire::Notice::resume({own_, 1}, {});
  ASSERT_GT(::send(socket->get(), request.bytes().data(), request.bytes().size(), MSG_NOSIGNAL), 0);
  test::PeerSocket made(std::move(*socket), 0, 0, 1);
  std::optional<MessageType> type;
  eventually([&] {
    listener_.serve();
    const auto message = made.receive();
    if (message && *message) type = (*message)->type;
    return !message || type;
  });
  EXPECT_EQ(type, MessageType::kFailed);
  listener_.release();
}

TEST_F(PeerChannelTest, MessageThatNoRankSends_RankLearnsWhy) {
  open();
  say(wire::Notice::lane_down({}));
  await(End::kLost);
  EXPECT_EQ(next(), MessageType::kAck);
  EXPECT_EQ(next(), MessageType::kFailed);
}

TEST_F(PeerChannelTest, RankAcknowledgesNothing_IsGivenUp) {
  open();
  for (std::uint32_t i = 0; i <= 1024; ++i) channel_->send(exchange(i));
  await(End::kLost);
  EXPECT_EQ(channel_->reason(), "it acknowledges nothing");
}

TEST_F(PeerChannelTest, BothHaveClosed_IsOverWhenTheCloseIsAcknowledged) {
  open();
  channel_->send_last(wire::Notice::without_body(MessageType::kClose));
  say(wire::Notice::ack({0, 0}));
  say(wire::Notice::without_body(MessageType::kClose));
  await(End::kClosed);
  EXPECT_FALSE(channel_->is_over());
  EXPECT_EQ(next_ack(), 0U);
  EXPECT_EQ(next(), MessageType::kClose);
  EXPECT_EQ(next_ack(), 1U);
  say(wire::Notice::ack({1, 1}));
  eventually([&] { return channel_->is_over(); });
}

// The rank that has closed waits for the close of this one, and would take its absence for a failure.
TEST_F(PeerChannelTest, ResetBetweenTheTwoCloses_ChannelIsMadeAgain) {
  open();
  say(wire::Notice::ack({0, 0}));
  say(wire::Notice::without_body(MessageType::kClose));
  await(End::kClosed);
  peer_.close_with_reset();
  accept_attempt();
  say(wire::Notice::ack({0, 1}));
  channel_->send_last(wire::Notice::without_body(MessageType::kClose));
  MessageType type = next();
  while (type == MessageType::kAck) type = next();
  EXPECT_EQ(type, MessageType::kClose);
  say(wire::Notice::ack({1, 1}));
  eventually([&] { return channel_->is_over(); });
}

TEST_F(PeerChannelTest, ProcessEndsAfterItsClose_IsOverWithoutAnAcknowledgement) {
  open();
  channel_->send_last(wire::Notice::without_body(MessageType::kClose));
  say(wire::Notice::without_body(MessageType::kClose));
  await(End::kClosed);
  listening_.reset();
  peer_.reset();
  eventually([&] { return channel_->is_over(); });
  EXPECT_EQ(channel_->end(), End::kClosed);
}

}  // namespace
}  // namespace verbatim::rma
