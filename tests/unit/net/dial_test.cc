#include "channel/dial.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <array>
#include <chrono>
#include <optional>
#include <thread>

#include "channel/hello_limits.h"
#include "support/loopback.h"

namespace verbatim {
namespace {

constexpr auto kLimit = std::chrono::seconds(20);

class DialTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<UniqueFd> socket = tcp_listen(test::loopback());
    ASSERT_TRUE(socket);
    listener_ = std::move(*socket);
    dial_.emplace(*local_address(listener_), sockaddr_storage{}, UINT64_MAX);
  }

  // The peer's end of the next connection, once its hello is there.
  UniqueFd next_hello(const Dial::Hello& hello) {
    const auto end = std::chrono::steady_clock::now() + kLimit;
    UniqueFd accepted;
    while (std::chrono::steady_clock::now() < end) {
      const Result<bool> done = dial_->advance(hello);
      EXPECT_TRUE(done && !*done);
      if (!accepted) {
        Result<std::optional<UniqueFd>> next = tcp_accept(listener_);
        EXPECT_TRUE(next);
        if (next->has_value()) accepted = std::move(**next);
      }
      std::array<std::uint8_t, wire::kHeaderBytes> header{};
      std::size_t filled = 0;
      if (accepted && *receive_into(accepted, header, filled)) return accepted;
    }
    ADD_FAILURE() << "no hello";
    return accepted;
  }
  // Until the dial has failed.
  Error failure(const Dial::Hello& hello) {
    const auto end = std::chrono::steady_clock::now() + kLimit;
    while (std::chrono::steady_clock::now() < end) {
      if (const Result<bool> done = dial_->advance(hello); !done) return done.error();
    }
    ADD_FAILURE() << "it goes on";
    return {};
  }

  static std::vector<std::uint8_t> hello() { return wire::encode_ready(); }

  UniqueFd listener_;
  std::optional<Dial> dial_;
};

// As when the thread is stopped between the two: the peer has given the connection up.
TEST_F(DialTest, HelloIsLateAndPeerCloses_BeginsAgain) {
  const auto late = [] {
    std::this_thread::sleep_for(std::chrono::nanoseconds(2 * kMaxHelloDelayNs));
    return hello();
  };
  next_hello(late).reset();
  next_hello(hello).reset();
  EXPECT_EQ(failure(hello).kind, ErrorKind::kRemote);
}

TEST_F(DialTest, PeerRejects_FailsWithItsReason) {
  const UniqueFd peer = next_hello(hello);
  EXPECT_TRUE(*OutgoingMessage(wire::encode_reject("it is another job")).send(peer));
  EXPECT_EQ(failure(hello).kind, ErrorKind::kRemote);
  EXPECT_EQ(dial_->refusal(), "it is another job");
}

TEST_F(DialTest, PeerAnswersOtherwise_Fails) {
  const UniqueFd peer = next_hello(hello);
  EXPECT_TRUE(*OutgoingMessage(wire::encode_ready()).send(peer));
  EXPECT_EQ(failure(hello).sys_errno, EPROTO);
  EXPECT_TRUE(dial_->refusal().empty());
}

TEST_F(DialTest, BeforeTheReply_SaysWhatIsAwaited) {
  EXPECT_EQ(dial_->pending().step, SetupStep::kConnectTcp);
  const UniqueFd peer = next_hello(hello);
  EXPECT_EQ(dial_->pending().step, SetupStep::kWaitForPeer);
  EXPECT_EQ(dial_->awaited().events, POLLIN);
  EXPECT_EQ(dial_->next_ns(), UINT64_MAX);
}

}  // namespace
}  // namespace verbatim
