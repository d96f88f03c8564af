// The side channel is made again over any address of the peer, by either end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "end_of_several_addresses.h"
#include "support/loopback.h"
#include "support/refusal.h"

namespace verbatim {
namespace {

TEST_F(EndOfSeveralAddresses, FirstAddressRefuses_NextOneIsUsed) {
  for (const CommKind kind : {CommKind::kSend, CommKind::kRecv}) {
    ASSERT_NO_FATAL_FAILURE(watch_one(kind));
    ASSERT_NO_FATAL_FAILURE(test::refuse_connections(listening_.get()));
    peer_.close_with_reset();
    test::PeerSocket attempt = asked(second_);
    ASSERT_NO_FATAL_FAILURE(answer(attempt));
    EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
    monitor_->unwatch(*comm_);
    watched_ = false;
    EXPECT_EQ(next(attempt), wire::MessageType::kFailed);
    ASSERT_NO_FATAL_FAILURE(test::accept_connections(listening_.get()));
  }
}

// The accepting side makes it again as the connecting side does.
TEST_F(EndOfSeveralAddresses, Receiver_MakesTheChannelAgain) {
  ASSERT_NO_FATAL_FAILURE(watch_one(CommKind::kRecv));
  peer_.close_with_reset();
  test::PeerSocket attempt = asked();
  ASSERT_NO_FATAL_FAILURE(answer(attempt));
  EXPECT_FALSE(has(CommEvent::kProbePeer));
}

TEST_F(EndOfSeveralAddresses, BothEndsAtOnce_AttemptOfConnectingSideIsKept) {
  bool kept = false;
  // The answer must come after the monitor has taken the peer's attempt, and soon: the test may be too fast or too
  // slow.
  for (int attempt = 0; !kept && attempt < 40 && !HasFailure(); ++attempt) {
    ASSERT_NO_FATAL_FAILURE(watch_one(CommKind::kSend));
    BothAttempts both = make_both();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const bool said = both.own.say(wire::Notice::ack({0, 0})) && both.own.say(wire::MessageType::kPing);
    const bool answered = said && next(both.own) == wire::MessageType::kPong;
    const std::optional<wire::MessageType> to_peer = first(both.of_peer);
    EXPECT_TRUE(!to_peer || to_peer == wire::MessageType::kAck);
    kept = answered && !to_peer;
    EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
    monitor_->unwatch(*comm_);
    watched_ = false;
  }
  EXPECT_TRUE(kept);
}

TEST_F(EndOfSeveralAddresses, BothEndsAtOnce_AcceptingSideTakesThePeers) {
  ASSERT_NO_FATAL_FAILURE(watch_one(CommKind::kRecv));
  BothAttempts both = make_both();
  EXPECT_EQ(first(both.of_peer), wire::MessageType::kAck);
  EXPECT_EQ(next(both.own), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
}

// Another host has the address: it accepts the TCP connection and does not answer.
TEST_F(EndOfSeveralAddresses, OwnAttemptIsNotAnswered_PeersIsTaken) {
  ASSERT_NO_FATAL_FAILURE(watch_one(CommKind::kSend));
  BothAttempts both = make_both();
  EXPECT_EQ(first(both.of_peer), wire::MessageType::kAck);
  EXPECT_EQ(next(both.own), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
}

// The notice may not have arrived on the old one. It is sent again until the peer has acknowledged it.
TEST_F(EndOfSeveralAddresses, FailureBeforeReplacement_IsReportedAgain) {
  ASSERT_NO_FATAL_FAILURE(watch_one(CommKind::kSend));
  comm_->set_device_event(IBV_EVENT_QP_FATAL, *comm_->endpoint().ports()[0]->device);
  auto& sender = static_cast<SendComm&>(*comm_);
  ASSERT_TRUE(ConnectedComms::fails(sender));
  ASSERT_EQ(next(peer_), wire::MessageType::kFailed);
  const sockaddr_storage address = *listener_->add(wire::Secret{1});
  test::PeerSocket made = resume(address, end());
  EXPECT_EQ(first(made), wire::MessageType::kAck);
  EXPECT_EQ(next(made), wire::MessageType::kFailed);
  EXPECT_EQ(next(made), wire::MessageType::kPing) << "the new path is tried";
  ASSERT_NO_FATAL_FAILURE(say(made, wire::Notice::ack({1, 0})));
  ASSERT_NO_FATAL_FAILURE(say(made, wire::MessageType::kPing));
  EXPECT_EQ(next(made), wire::MessageType::kPong);
  test::PeerSocket again = resume(address, end());
  ASSERT_NO_FATAL_FAILURE(say(again, wire::MessageType::kPing));
  EXPECT_EQ(next(again), wire::MessageType::kPong);
}

// An end of file would be the end of this process for the peer.
TEST_F(EndOfSeveralAddresses, ReplacedChannel_EndsWithReset) {
  ASSERT_NO_FATAL_FAILURE(watch_one(CommKind::kSend));
  test::PeerSocket made = resume(*listener_->add(wire::Secret{1}), end());
  EXPECT_EQ(first(made), wire::MessageType::kAck);
  EXPECT_EQ(next(peer_), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
}

// The end of the connection that is asked for may be either one: both have an entry where both are in one process.
TEST_F(EndOfSeveralAddresses, ConnectingSideTakesThePeersChannel) {
  ASSERT_NO_FATAL_FAILURE(watch_one(CommKind::kSend));
  const sockaddr_storage address = *listener_->add(wire::Secret{1});
  test::PeerSocket wrong_end = resume(address, end().other());
  EXPECT_EQ(next(wrong_end), std::nullopt);
  test::PeerSocket made = resume(address, end());
  EXPECT_EQ(first(made), wire::MessageType::kAck);
  EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
}

// The listener of a process has a socket for each address.
TEST_F(EndOfSeveralAddresses, Listener_ServesEachAddress) {
  const SocketInterface interfaces[] = {
      {"lo", test::loopback(1), {}}, {"lo", test::loopback(2), {}}, {"lo", test::loopback(3), {}}};
  Listener listener(test::loopback(1), interfaces);
  ASSERT_TRUE(listener.add(wire::Secret{2}));
  const std::vector<wire::Address> addresses = listener.addresses(Listener::Use::kLook);
  ASSERT_EQ(addresses.size(), 3U);
  int key = 0;
  std::vector<test::PeerSocket> made;
  for (const wire::Address& address : addresses) {
    const wire::ConnectionEnd end{{wire::listen_id({2}), static_cast<std::uint64_t>(++key)}, 1};
    listener.add_connection(end, {}, key);
    made.push_back(resume(wire::to_sockaddr(address), end));
  }
  std::vector<int> keys;
  std::vector<int> watched;
  ASSERT_TRUE(ConnectedComms::eventually([&] {
    watched.clear();
    for (const auto& one : listener.take_resumed([&](int fd) { watched.push_back(fd); })) keys.push_back(one.key);
    return keys.size() == 3;
  }));
  std::ranges::sort(keys);
  EXPECT_EQ(keys, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(watched.size(), 3U);
  for (int i = 1; i <= 3; ++i) {
    listener.remove_connection({{wire::listen_id({2}), static_cast<std::uint64_t>(i)}, 1}, {}, std::nullopt);
  }
  listener.remove(wire::listen_id({2}));
  watched.clear();
  listener.take_resumed([&](int fd) { watched.push_back(fd); });
  EXPECT_TRUE(watched.empty()) << "they are closed with the last listen";
}

// Who has recorded a request, or knows no session key, does not get the side channel.
TEST_F(EndOfSeveralAddresses, Listener_TakesOnlyNewRequestsWithTheSessionKey) {
  constexpr wire::Key kSession{5};
  Listener listener(test::loopback(1));
  const Result<sockaddr_storage> address = listener.add(wire::Secret{2});
  ASSERT_TRUE(address);
  const wire::ConnectionEnd end{{wire::listen_id({2}), 1}, 1};
  listener.add_connection(end, kSession, 7);
  const auto ask = [&](std::uint64_t number, const wire::Key& session) {
    Result<UniqueFd> made = tcp_connect(*address, {});
    EXPECT_TRUE(made);
    EXPECT_TRUE(ConnectedComms::eventually([&] { return *tcp_connected(*made); }));
    const wire::Notice request = wire::Notice::resume({end, number}, session);
    EXPECT_GT(::send(made->get(), request.bytes().data(), request.bytes().size(), MSG_NOSIGNAL), 0);
    return std::move(*made);
  };
  const auto is_taken = [&](std::uint64_t number, const wire::Key& session) {
    const UniqueFd made = ask(number, session);
    std::size_t taken = 0;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      taken += listener.take_resumed([](int) {}).size();
      return taken != 0 || !check_open(made);
    }));
    return taken == 1;
  };
  const auto is_answered = [&](std::uint64_t number, const wire::Key& session) {
    const UniqueFd made = ask(number, session);
    ssize_t count = -1;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      static_cast<void>(listener.poll(wire::listen_id({2})));
      std::uint8_t byte = 0;
      return (count = ::recv(made.get(), &byte, 1, 0)) >= 0;
    }));
    return count == 1;
  };
  EXPECT_FALSE(is_taken(1, wire::Key{6}));
  EXPECT_FALSE(is_taken(0, kSession)) << "numbers begin at 1";
  EXPECT_TRUE(is_taken(1, kSession)) << "the wrong one has not used it up";
  EXPECT_FALSE(is_taken(1, kSession));
  EXPECT_TRUE(is_taken(3, kSession)) << "one may be lost";
  EXPECT_FALSE(is_taken(2, kSession));
  {
    UniqueFd given_up = ask(5, kSession);
    close_with_reset(given_up);
    EXPECT_FALSE(is_taken(5, kSession)) << "also not of a process that has read it";
  }
  listener.remove_connection(end, kSession, wire::MessageType::kClose);
  EXPECT_FALSE(is_answered(5, kSession));
  EXPECT_FALSE(is_answered(6, wire::Key{6}));
  EXPECT_TRUE(is_answered(6, kSession)) << "the peer learns that the connection has ended";
  EXPECT_FALSE(is_answered(6, kSession));
  listener.remove(wire::listen_id({2}));
}

// A process that only connects: while a connector holds the listener, its sockets are open.
TEST_F(EndOfSeveralAddresses, HeldListener_StaysOpen) {
  Listener listener(test::loopback(1));
  const std::vector<wire::Address> addresses = listener.addresses(Listener::Use::kHold);
  ASSERT_EQ(addresses.size(), 1U);
  ASSERT_TRUE(listener.add(wire::Secret{2}));
  listener.remove(wire::listen_id({2}));
  Result<UniqueFd> made = tcp_connect(wire::to_sockaddr(addresses.front()), {});
  ASSERT_TRUE(made);
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    const Result<bool> connected = tcp_connected(*made);
    return connected && *connected;
  }));
  // A peer that asks for the listen learns that it is closed.
  wire::Hello hello;
  hello.listen = wire::listen_id({2});
  hello.devices.resize(1);
  hello.qps.resize(1);
  OutgoingMessage message(wire::with_mac(wire::encode_hello(wire::MessageType::kConnect, hello), wire::hello_key({2})));
  ASSERT_TRUE(message.send(*made));
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    listener.serve();
    return !check_open(*made);
  }));
  listener.release();
  std::size_t open = 0;
  listener.take_resumed([&](int) { ++open; });
  EXPECT_EQ(open, 0U);
}

}  // namespace
}  // namespace verbatim
