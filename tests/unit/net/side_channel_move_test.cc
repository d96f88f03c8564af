//: in unit_net_failover

// A side channel over which the peer does not answer a notice about a lane moves to another address of the peer.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "end_of_several_addresses.h"
#include "failover_traffic.h"

namespace verbatim {
namespace {

using Milliseconds = std::chrono::milliseconds;

class Move final : public EndOfSeveralAddresses {
 public:
  explicit Move(CommKind kind) {
    int members[] = {0, 1};
    const Result<std::size_t> device = merge_devices(members, 2, 8);
    EXPECT_TRUE(device);
    if (device) start_with_addresses(*device);
    if (!HasFatalFailure()) watch_one(kind);
  }
  ~Move() override { TearDown(); }
  void TestBody() override {}

  void take_first_lane_down() {
    const Port& port = *comm_->endpoint().ports()[0];
    comm_->port_down(*port.device, port.port_num);
    progress();
  }
  void progress() {
    if (auto* const sender = dynamic_cast<SendComm*>(comm_.get())) return sender->progress();
    static_cast<RecvComm&>(*comm_).progress();
  }
  // Reads the notice and the ping after it.
  void expect_notice(test::PeerSocket& channel) {
    EXPECT_EQ(next(channel), wire::MessageType::kLaneDown);
    std::optional<wire::MessageType> type = next(channel);
    while (type == wire::MessageType::kLaneFenced) type = next(channel);
    EXPECT_EQ(type, wire::MessageType::kPing);
  }

  void without_answer() {
    take_first_lane_down();
    expect_notice(peer_);
    test::PeerSocket attempt = asked(second_);
    ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::ack({0, 0})));
    EXPECT_EQ(next(attempt), wire::MessageType::kLaneDown) << "the notice is sent again";
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      const std::vector<std::string> lines = log_.infos();
      return std::ranges::any_of(lines, [](const std::string& line) {
        return line.find("; the side channel uses 127.0.0.1 and 127.0.0.2 now") != std::string::npos;
      });
    }));
    EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
    EXPECT_EQ(comm_->error(), nullptr);
  }

  void ends_while_it_moves() {
    take_first_lane_down();
    expect_notice(peer_);
    test::PeerSocket attempt = asked(second_);  // never answered
    EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
    ASSERT_EQ(::shutdown(peer_.socket().get(), SHUT_WR), 0);  // close() would reset it if something is unread
    EXPECT_TRUE(eventually_has(CommEvent::kPeerDisconnected));
  }

  // Whether the side channel has stayed where it is.
  bool stays_with_answer() {
    take_first_lane_down();
    expect_notice(peer_);
    say(peer_, wire::MessageType::kPong);
    std::this_thread::sleep_for(Milliseconds(300));
    const Result<std::optional<UniqueFd>> attempt = tcp_accept(second_);
    EXPECT_TRUE(attempt);
    return attempt && !*attempt;
  }
};

TEST(SideChannelMove, NoAnswerToLaneNotice_OtherAddressIsUsed) {
  for (const CommKind kind : {CommKind::kSend, CommKind::kRecv}) {
    in_child("", [&] { Move(kind).without_answer(); });
  }
}

// The old side channel tells how the peer is until there is a new one.
TEST(SideChannelMove, PeerEndsMeanwhile_IsSeenAtOnce) {
  in_child("", [] { Move(CommKind::kSend).ends_while_it_moves(); });
}

TEST(SideChannelMove, AnswerToLaneNotice_ChannelStays) {
  const auto body = [] {
    for (int attempt = 0; attempt < 20; ++attempt) {  // on a busy machine the test, or the monitor, may be too slow
      if (Move(CommKind::kSend).stays_with_answer() || ::testing::Test::HasFailure()) return;
    }
    ADD_FAILURE() << "the side channel always moves although the peer has answered";
  };
  in_child("", body);
}

}  // namespace
}  // namespace verbatim
