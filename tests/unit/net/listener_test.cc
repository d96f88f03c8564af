#include "channel/listener.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "base/socket.h"
#include "channel/hello_limits.h"
#include "support/log_lines.h"
#include "support/loopback.h"
#include "unit/support/log_capture.h"
#include "wire/authentication.h"
#include "wire/limits.h"

namespace verbatim {
namespace {

constexpr auto kListenerTimeout = std::chrono::seconds(20);

std::vector<std::uint8_t> hello_with(const wire::Secret& secret, wire::MessageType type = wire::MessageType::kConnect) {
  static std::uint64_t attempts = 0;
  wire::Hello hello;
  hello.listen = wire::listen_id(secret);
  hello.attempt = ++attempts;
  hello.devices.push_back({.max_message_bytes = 1 << 20, .speed_mbps = 100'000, .mtu = 5, .name = "dev"});
  hello.qps.push_back({.number = 17});
  return wire::with_mac(wire::encode_hello(type, hello), wire::hello_key(secret));
}

class ListenerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    rlimit descriptors{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &descriptors), 0);
    descriptors.rlim_cur = descriptors.rlim_max;  // tests below hold both ends of many connections
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &descriptors), 0);
    listener_ = std::make_unique<Listener>(test::loopback());
    mine_.fill(1);
    const Result<sockaddr_storage> address = listener_->add(mine_);
    ASSERT_TRUE(address);
    address_ = *address;
  }

  UniqueFd connect_tcp() const {
    Result<UniqueFd> socket = tcp_connect(address_, {});
    EXPECT_TRUE(socket);
    while (!*tcp_connected(*socket)) std::this_thread::yield();
    return std::move(*socket);
  }

  static void send_bytes(const UniqueFd& socket, std::vector<std::uint8_t> bytes) {
    EXPECT_TRUE(*OutgoingMessage(std::move(bytes)).send(socket));
  }

  // Polls until there are `count` connect requests, or until the timeout.
  std::vector<ConnectRequest> wait_for_requests(const wire::Secret& secret, std::size_t count) const {
    std::vector<ConnectRequest> all;
    const auto end = std::chrono::steady_clock::now() + kListenerTimeout;
    while (all.size() < count && std::chrono::steady_clock::now() < end) {
      Result<std::vector<ConnectRequest>> some = listener_->poll(wire::listen_id(secret));
      EXPECT_TRUE(some);
      for (ConnectRequest& one : *some) all.push_back(std::move(one));
    }
    return all;
  }

  // Whether the listener has closed the connection.
  bool is_closed(const UniqueFd& socket) const {
    const auto end = std::chrono::steady_clock::now() + kListenerTimeout;
    while (std::chrono::steady_clock::now() < end) {
      const Result<std::vector<ConnectRequest>> requests = listener_->poll(wire::listen_id(mine_));
      EXPECT_TRUE(requests && requests->empty());
      std::array<std::uint8_t, 1> byte{};
      std::size_t filled = 0;
      const Result<bool> received = receive_into(socket, byte, filled);
      if (!received) return true;
    }
    return false;
  }

  std::vector<pollfd> awaited() const {
    std::vector<pollfd> sockets;
    EXPECT_EQ(listener_->await(sockets), UINT64_MAX);
    return sockets;
  }
  // Whether the listener waits for the bytes of so many connections.
  bool has_accepted(std::size_t connections) const { return awaited().size() == 1 + connections; }

  std::unique_ptr<Listener> listener_;
  sockaddr_storage address_{};
  wire::Secret mine_{};
};

TEST_F(ListenerTest, HelloWithSecret_IsReturned) {
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, hello_with(mine_));
  const std::vector<ConnectRequest> found = wait_for_requests(mine_, 1);
  ASSERT_EQ(found.size(), 1U);
  const Result<wire::Hello> hello = wire::decode_hello(found[0].hello.body());
  ASSERT_TRUE(hello);
  EXPECT_EQ(hello->qps[0].number, 17U);
}

// A wrong hello does not make the attempt number a used one.
TEST_F(ListenerTest, HelloAfterOneWithAWrongMac_IsReturned) {
  const std::vector<std::uint8_t> hello = hello_with(mine_);
  std::vector<std::uint8_t> wrong = hello;
  wrong.back() ^= 1;
  const UniqueFd first = connect_tcp();
  send_bytes(first, wrong);
  EXPECT_TRUE(is_closed(first));
  const UniqueFd second = connect_tcp();
  send_bytes(second, hello);
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
}

// As of a host with another VERBATIM_PSK_FILE.
TEST_F(ListenerTest, HellosWithAWrongMac_AreRejectedAndGiveOneWarning) {
  const LogCapture log;
  for (int i = 0; i < 3; ++i) {
    const UniqueFd peer = connect_tcp();
    std::vector<std::uint8_t> wrong = hello_with(mine_);
    wrong.back() ^= 1;
    send_bytes(peer, wrong);
    IncomingMessage reply;
    Result<bool> received(false);
    const auto end = std::chrono::steady_clock::now() + kListenerTimeout;
    while (received && !*received && std::chrono::steady_clock::now() < end) {
      EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
      received = reply.receive(peer);
    }
    ASSERT_TRUE(received && *received);
    EXPECT_EQ(reply.type(), wire::MessageType::kReject);
    EXPECT_EQ(wire::decode_reject(reply.body()), "VERBATIM_PSK_FILE is not the same at both ends");
    if (i != 0) continue;
    test::expect_log_lines({test::replaced(log.only_warning(), to_string(*local_address(peer)), "PEER")});
  }
  EXPECT_EQ(log.warnings().size(), 1U);
}

TEST_F(ListenerTest, HelloByteByByte_IsReturned) {
  const UniqueFd peer = connect_tcp();
  for (const std::uint8_t byte : hello_with(mine_)) {
    send_bytes(peer, {byte});
    EXPECT_TRUE(listener_->poll(wire::ListenId{}));
  }
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
}

TEST_F(ListenerTest, TwoListens_EachGetsItsPeers) {
  wire::Secret other{};
  other.fill(2);
  const Result<sockaddr_storage> same = listener_->add(other);
  ASSERT_TRUE(same);
  EXPECT_EQ(to_string(*same), to_string(address_));
  const UniqueFd first = connect_tcp();
  const UniqueFd second = connect_tcp();
  send_bytes(first, hello_with(other));
  send_bytes(second, hello_with(mine_));
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);  // a poll for one listen serves the other listen
  EXPECT_EQ(wait_for_requests(other, 1).size(), 1U);
  EXPECT_TRUE(wait_for_requests(mine_, 0).empty());
}

TEST_F(ListenerTest, InvalidConnections_AreClosedAndPeerIsServed) {
  wire::Secret wrong{};
  wrong.fill(9);
  const UniqueFd wrong_secret = connect_tcp();
  send_bytes(wrong_secret, hello_with(wrong));
  const UniqueFd no_hello = connect_tcp();
  send_bytes(no_hello, std::vector<std::uint8_t>(100, 0x41));
  const UniqueFd wrong_type = connect_tcp();
  send_bytes(wrong_type, hello_with(mine_, wire::MessageType::kAccept));
  const UniqueFd no_bytes = connect_tcp();
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, hello_with(mine_));

  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
  EXPECT_TRUE(is_closed(wrong_secret));
  EXPECT_TRUE(is_closed(no_hello));
  EXPECT_TRUE(is_closed(wrong_type));
}

// Nobody waits for its body, and no memory is taken for it.
TEST_F(ListenerTest, BeginningOfMessageThatDoesNotBelongHere_IsClosedAtOnce) {
  std::vector<std::uint8_t> unknown = hello_with(wire::Secret{});
  unknown.resize(wire::kHeaderBytes + sizeof(wire::ConnectionId));
  std::vector<std::uint8_t> resume = unknown;
  wire::put_header(std::span(resume).first<wire::kHeaderBytes>(), wire::MessageType::kResume, wire::kMaxBodyBytes);
  std::vector<std::uint8_t> other_version(unknown.begin(), unknown.begin() + wire::kHeaderBytes);
  ++other_version[4];
  const std::vector<std::uint8_t> other_protocol(wire::kHeaderBytes, 0x41);
  std::vector<std::uint8_t> large = other_protocol;
  wire::put_header(std::span(large).first<wire::kHeaderBytes>(), wire::MessageType::kConnect, wire::kMaxBodyBytes + 1);
  for (const auto& beginning : {unknown, resume, other_version, other_protocol, large}) {
    const UniqueFd stranger = connect_tcp();
    send_bytes(stranger, {beginning.front()});
    while (!has_accepted(1)) EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
    send_bytes(stranger, {beginning.begin() + 1, beginning.end()});
    pollfd arrived = awaited().back();
    EXPECT_EQ(::poll(&arrived, 1, 20'000), 1);
    EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
    EXPECT_TRUE(has_accepted(0));
  }
}

TEST_F(ListenerTest, HelloShorterThanItsBeginning_IsClosed) {
  const UniqueFd stranger = connect_tcp();
  std::vector<std::uint8_t> message = hello_with(mine_);
  wire::put_header(std::span(message).first<wire::kHeaderBytes>(), wire::MessageType::kConnect, 4);
  send_bytes(stranger, message);
  EXPECT_TRUE(is_closed(stranger));
}

// As RMA's connect waits, while another thread reads the hello.
TEST_F(ListenerTest, HelloReadByAnotherPoll_WritesItsEventfd) {
  const UniqueFd arrival(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  wire::Secret other{};
  other.fill(2);
  ASSERT_TRUE(listener_->add(other, arrival.get()));
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, hello_with(other));
  pollfd waits{arrival.get(), POLLIN, 0};
  const auto end = std::chrono::steady_clock::now() + kListenerTimeout;
  while (::poll(&waits, 1, 0) == 0 && std::chrono::steady_clock::now() < end)
    EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
  EXPECT_EQ(waits.revents, POLLIN);
  EXPECT_EQ(wait_for_requests(other, 1).size(), 1U);
}

TEST_F(ListenerTest, AwaitedSockets_HaveAnEventWhenPeersConnectAndSend) {
  const auto has_event = [&] {
    std::vector<pollfd> sockets = awaited();
    return ::poll(sockets.data(), sockets.size(), 20'000) > 0;
  };
  const std::vector<std::uint8_t> message = hello_with(mine_);
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, {message.front()});
  EXPECT_TRUE(has_event());
  while (has_accepted(0)) EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
  send_bytes(peer, {message.begin() + 1, message.end()});
  EXPECT_TRUE(has_event());
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
}

// A further one must wait for a while, and nobody spins meanwhile. All are there before the listener looks: where it
// takes longer than that while to accept them one by one, it is never full.
TEST_F(ListenerTest, AsManyAsItKeeps_AreAwaitedWithoutTheListeningSocket) {
  std::vector<UniqueFd> all;
  std::vector<pollfd> sockets;
  std::uint64_t until = UINT64_MAX;
  while (until == UINT64_MAX) {
    for (std::size_t i = 0; i < kMaxPending; ++i) {
      all.push_back(connect_tcp());
      send_bytes(all.back(), {0x41});
    }
    ASSERT_TRUE(listener_->poll(wire::listen_id(mine_)));
    sockets.clear();
    until = listener_->await(sockets);
    ASSERT_LT(all.size(), 4096U);
  }
  EXPECT_EQ(sockets.size(), kMaxPending);
  EXPECT_GT(until, monotonic_ns());
}

TEST_F(ListenerTest, ManyPeersAtOnce_AreAllServed) {
  std::vector<UniqueFd> peers;
  for (int i = 0; i < 700; ++i) {
    peers.push_back(connect_tcp());
    send_bytes(peers.back(), hello_with(mine_));
  }
  EXPECT_EQ(wait_for_requests(mine_, peers.size()).size(), peers.size());
}

// More incomplete hellos than could time out one after another within the test.
TEST_F(ListenerTest, ManyIncompleteHellos_DoNotBlockPeer) {
  std::vector<UniqueFd> flood;
  for (int i = 0; i < 8 * 512; ++i) {
    flood.push_back(connect_tcp());
    send_bytes(flood.back(), {0x41});  // the kernel does not pass on connections without a byte (TCP_DEFER_ACCEPT)
    EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
  }
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, hello_with(mine_));
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
  EXPECT_TRUE(is_closed(flood.front()));
}

TEST_F(ListenerTest, IncompleteHello_IsClosedAfterTimeout) {
  const UniqueFd incomplete = connect_tcp();
  send_bytes(incomplete, {0x41});
  EXPECT_TRUE(is_closed(incomplete));
}

TEST_F(ListenerTest, OtherProtocolVersion_IsRejectedWithReason) {
  const LogCapture log;
  std::vector<std::uint8_t> message = hello_with(mine_);
  ++message[4];
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, message);
  std::vector<std::uint8_t> header(wire::kHeaderBytes);
  std::size_t filled = 0;
  const auto end = std::chrono::steady_clock::now() + kListenerTimeout;
  while (filled < header.size() && std::chrono::steady_clock::now() < end) {
    EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
    static_cast<void>(receive_into(peer, header, filled));
  }
  ASSERT_EQ(filled, header.size());
  // The reject has the peer's version, so that the peer can read it.
  EXPECT_EQ(header[4], wire::kProtocolVersion + 1);
  --header[4];
  const auto decoded = wire::decode_header(std::span<const std::uint8_t, wire::kHeaderBytes>(header));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->type, wire::MessageType::kReject);
  std::vector<std::uint8_t> body(decoded->body_bytes);
  filled = 0;
  while (!*receive_into(peer, body, filled)) std::this_thread::yield();
  const std::string why = to_string(*local_address(peer)) + " speaks protocol version " +
                          std::to_string(wire::kProtocolVersion + 1) + " of Verbatim, " + to_string(address_) +
                          " version " + std::to_string(wire::kProtocolVersion);
  EXPECT_EQ(wire::decode_reject(body), why);
  test::expect_log_lines({test::replaced(log.only_warning(), why, "WHY")});
}

TEST_F(ListenerTest, ManyOfOtherProtocolVersion_GiveOneWarning) {
  const LogCapture log;
  std::vector<std::uint8_t> message = hello_with(mine_);
  ++message[4];
  for (int i = 0; i < 5; ++i) {
    const UniqueFd peer = connect_tcp();
    send_bytes(peer, message);
    EXPECT_TRUE(is_closed(peer));
  }
  EXPECT_EQ(log.warnings().size(), 1U);
}

// The bytes of a hello are sent again while the listen is still open.
TEST_F(ListenerTest, ReplayedHello_IsClosed) {
  const std::vector<std::uint8_t> hello = hello_with(mine_);
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, hello);
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
  const UniqueFd replay = connect_tcp();
  send_bytes(replay, hello);
  EXPECT_TRUE(is_closed(replay));
  const UniqueFd next = connect_tcp();
  send_bytes(next, hello_with(mine_));
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
}

TEST_F(ListenerTest, HelloForRemovedListen_IsClosed) {
  wire::Secret other{};
  other.fill(2);
  ASSERT_TRUE(listener_->add(other));
  listener_->remove(wire::listen_id(mine_));
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, hello_with(mine_));
  EXPECT_TRUE(is_closed(peer));
}

// No poll comes after the removal of the last listen.
TEST_F(ListenerTest, LastListenRemoved_PendingConnectionsAreRejected) {
  const UniqueFd waiting = connect_tcp();
  send_bytes(waiting, {0x41});
  EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
  const UniqueFd unseen = connect_tcp();
  send_bytes(unseen, hello_with(mine_));
  listener_->remove(wire::listen_id(mine_));
  for (const UniqueFd* peer : {&waiting, &unseen}) {
    std::array<std::uint8_t, 4096> bytes{};
    std::size_t filled = 0;
    Result<bool> received = false;
    const auto end = std::chrono::steady_clock::now() + kListenerTimeout;
    while (received && std::chrono::steady_clock::now() < end) received = receive_into(*peer, bytes, filled);
    EXPECT_FALSE(received);
    EXPECT_EQ(filled != 0, peer == &unseen);  // only a complete hello gets a reject
  }
  Result<UniqueFd> late = tcp_connect(address_, {});
  Result<bool> connected = late ? tcp_connected(*late) : Result<bool>(late.error());
  while (connected && !*connected) connected = tcp_connected(*late);
  ASSERT_FALSE(connected);
  EXPECT_EQ(connected.error().sys_errno, ECONNREFUSED);
}

// Connections of the first listen are still open.
TEST_F(ListenerTest, ListenAddedAgain_UsesSamePort) {
  const UniqueFd first = connect_tcp();
  send_bytes(first, hello_with(mine_));
  const std::vector<ConnectRequest> found = wait_for_requests(mine_, 1);
  ASSERT_EQ(found.size(), 1U);
  listener_->remove(wire::listen_id(mine_));
  const Result<sockaddr_storage> again = listener_->add(mine_);
  ASSERT_TRUE(again);
  EXPECT_EQ(to_string(*again), to_string(address_));
  const UniqueFd second = connect_tcp();
  send_bytes(second, hello_with(mine_));
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
}

TEST_F(ListenerTest, OutOfDescriptors_IsReportedOnceAndRecovers) {
  const UniqueFd peer = connect_tcp();
  send_bytes(peer, hello_with(mine_));
  const LogCapture log;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const UniqueFd next(::dup(STDERR_FILENO));
  const rlimit none = {static_cast<rlim_t>(next.get()), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(listener_->poll(wire::listen_id(mine_)));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  const std::string limit = " of " + std::to_string(none.rlim_cur) + " (";
  test::expect_log_lines(
      {test::replaced(test::replaced(log.only_warning(), to_string(address_), "ADDRESS"), limit, " of # (")});
  EXPECT_EQ(wait_for_requests(mine_, 1).size(), 1U);
}

}  // namespace
}  // namespace verbatim
