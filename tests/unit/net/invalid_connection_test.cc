//: in conformance

// Connections to the listening port from programs that do not have the handle: none may become a comm, and none may
// prevent the right peer from connecting.
#include <arpa/inet.h>
#include <malloc.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "channel/incoming_message.h"
#include "conformance/conformance.h"
#include "wire/authentication.h"
#include "wire/handle.h"
#include "wire/handshake.h"

namespace conformance {
namespace {

class InvalidConnections : public Conformance {
 protected:
  static verbatim::wire::Handle decode(Handle& handle) {
    auto decoded =
        verbatim::wire::decode_handle(std::span<const std::uint8_t, verbatim::wire::kHandleBytes>(handle.bytes));
    EXPECT_TRUE(decoded);
    return decoded ? *decoded : verbatim::wire::Handle{};
  }

  static verbatim::UniqueFd connect_tcp(const verbatim::wire::Handle& handle) {
    verbatim::UniqueFd socket(::socket(handle.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const socklen_t size = handle.address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&handle.address), size), 0)
        << std::strerror(errno);
    return socket;
  }

  static void send_bytes(const verbatim::UniqueFd& socket, std::span<const std::uint8_t> bytes) {
    EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  // `invalid_client` opens its connections first. Then the right peer must be able to connect and to exchange data.
  template <typename Client>
  void expect_peer_is_served(const Client& invalid_client) {
    const End end{context(), 0};
    Handle handle;
    void* const listen_comm = listen(end, handle);
    ASSERT_NE(listen_comm, nullptr);
    const std::vector<verbatim::UniqueFd> kept_open = invalid_client(decode(handle));
    void* recv_comm = nullptr;
    const auto quiet_end = Clock::now() + kQuiet;
    while (Clock::now() < quiet_end) {
      EXPECT_OK(net().accept(listen_comm, &recv_comm));
      ASSERT_EQ(recv_comm, nullptr) << "an invalid connection was accepted";
    }
    TestConnection link = Conformance::connect(listen_comm, end, handle);
    service().run([&] { EXPECT_OK(net().close_listen(listen_comm)); });
    exchange_one(link, 1000);
    take_warnings();  // the plugin may log rejected connections
  }

  // A valid hello with this secret.
  static std::vector<std::uint8_t> make_hello(verbatim::wire::Secret secret) {
    verbatim::wire::Hello hello;
    hello.listen = verbatim::wire::listen_id(secret);
    static const verbatim::wire::KeyPair keys = *verbatim::wire::make_key_pair();
    hello.key = keys.sent;
    hello.host = "invalid";
    hello.devices.resize(1);
    hello.devices[0].name = "softverbs0";
    hello.devices[0].mtu = 5;
    hello.devices[0].port = 1;
    hello.devices[0].link_layer = 2;  // Ethernet
    hello.devices[0].gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1};
    hello.devices[0].gid_index = 3;
    hello.devices[0].responder_reads = 16;
    hello.devices[0].max_message_bytes = 1U << 30;
    hello.devices[0].speed_mbps = 100'000;
    hello.qps.resize(1);
    hello.qps[0].number = 17;
    return verbatim::wire::with_mac(verbatim::wire::encode_hello(verbatim::wire::MessageType::kConnect, hello),
                                    verbatim::wire::hello_key(secret));
  }
};
EVERY_VERSION(InvalidConnections);

TEST_P(InvalidConnections, ConnectedWithoutHello_PeerIsServed) {
  expect_peer_is_served([](const verbatim::wire::Handle& handle) {
    std::vector<verbatim::UniqueFd> sockets;
    for (int i = 0; i < 5; ++i) sockets.push_back(connect_tcp(handle));
    return sockets;
  });
}

TEST_P(InvalidConnections, ClosedAtOnce_PeerIsServed) {
  expect_peer_is_served([](const verbatim::wire::Handle& handle) {
    for (int i = 0; i < 5; ++i) connect_tcp(handle);
    return std::vector<verbatim::UniqueFd>();
  });
}

TEST_P(InvalidConnections, RandomBytes_PeerIsServed) {
  expect_peer_is_served([](const verbatim::wire::Handle& handle) {
    std::vector<verbatim::UniqueFd> sockets;
    for (const std::uint8_t byte : {std::uint8_t{0x00}, std::uint8_t{0x47}, std::uint8_t{0xff}}) {
      sockets.push_back(connect_tcp(handle));
      send_bytes(sockets.back(), std::vector<std::uint8_t>(3000, byte));
    }
    return sockets;
  });
}

TEST_P(InvalidConnections, IncompleteHello_PeerIsServed) {
  expect_peer_is_served([](const verbatim::wire::Handle& handle) {
    const std::vector<std::uint8_t> hello = make_hello(handle.secret);
    std::vector<verbatim::UniqueFd> sockets;
    for (const std::size_t size : {std::size_t{1}, verbatim::wire::kHeaderBytes, hello.size() - 1}) {
      sockets.push_back(connect_tcp(handle));
      send_bytes(sockets.back(), {hello.data(), size});
    }
    return sockets;
  });
}

TEST_P(InvalidConnections, WrongSecret_PeerIsServed) {
  expect_peer_is_served([](const verbatim::wire::Handle& handle) {
    std::vector<verbatim::UniqueFd> sockets;
    verbatim::wire::Secret near = handle.secret;
    near.back() ^= 1;
    for (const verbatim::wire::Secret& secret : {near, verbatim::wire::Secret{}}) {
      sockets.push_back(connect_tcp(handle));
      send_bytes(sockets.back(), make_hello(secret));
    }
    return sockets;
  });
}

TEST_P(InvalidConnections, OversizedLength_PeerIsServed) {
  expect_peer_is_served([](const verbatim::wire::Handle& handle) {
    std::vector<std::uint8_t> hello = make_hello(handle.secret);
    std::memset(hello.data() + 8, 0xff, 4);  // Header::body_bytes
    std::vector<verbatim::UniqueFd> sockets;
    sockets.push_back(connect_tcp(handle));
    send_bytes(sockets.back(), hello);
    return sockets;
  });
}

// A peer with another protocol version gets a reject with the reason.
TEST_P(InvalidConnections, OtherProtocolVersion_IsRejectedWithReason) {
  std::vector<verbatim::UniqueFd> sockets;
  expect_peer_is_served([&](const verbatim::wire::Handle& handle) {
    for (const std::uint16_t version : {std::uint16_t{0}, std::uint16_t{1}, std::uint16_t{0xffff}}) {
      std::vector<std::uint8_t> hello = make_hello(handle.secret);
      std::memcpy(hello.data() + 4, &version, sizeof version);  // Header::version
      sockets.push_back(connect_tcp(handle));
      send_bytes(sockets.back(), hello);
    }
    return std::vector<verbatim::UniqueFd>();
  });
  for (const verbatim::UniqueFd& socket : sockets) {
    std::array<char, 256> reject{};
    EXPECT_GT(::recv(socket.get(), reject.data(), reject.size(), MSG_DONTWAIT), 0);
    EXPECT_NE(std::string(reject.begin(), reject.end()).find(" speaks protocol version "), std::string::npos);
  }
}

class ManyInvalidConnections : public InvalidConnections {
 protected:
  // Raises the limit of descriptors, because both ends of each connection are in this process.
  void SetUp() override {
    getrlimit(RLIMIT_NOFILE, &limit_);
    rlimit raised = limit_;
    raised.rlim_cur = raised.rlim_max;
    setrlimit(RLIMIT_NOFILE, &raised);
    if (raised.rlim_cur < 2 * kConnections + 1000) GTEST_SKIP() << "the limit of descriptors is too low";
    InvalidConnections::SetUp();
  }
  void TearDown() override {
    if (!IsSkipped()) InvalidConnections::TearDown();
    setrlimit(RLIMIT_NOFILE, &limit_);
  }

  static constexpr std::size_t kConnections = 1200;

 private:
  rlimit limit_{};
};
INSTANTIATE_TEST_SUITE_P(Net, ManyInvalidConnections, ::testing::Values(8, 12), version_name);

// More connections than the listener reads at a time, without a hello or with a part of it: the right peer must get
// its turn.
TEST_P(ManyInvalidConnections, StayOpen_PeerIsServedAndMemoryIsBounded) {
  std::size_t heap = 0;
  expect_peer_is_served([&](const verbatim::wire::Handle& handle) {
    const std::vector<std::uint8_t> hello = make_hello(handle.secret);
    std::vector<verbatim::UniqueFd> sockets;
    for (std::size_t i = 0; i < kConnections; ++i) {
      sockets.push_back(connect_tcp(handle));
      send_bytes(sockets.back(), {hello.data(), i % 2 == 0 ? 0 : i % (hello.size() - 1)});
    }
    heap = mallinfo2().uordblks;
    return sockets;
  });
  EXPECT_LT(mallinfo2().uordblks, heap + (1 << 20));
}

// Thousands of connections, one after the other: no memory of closed ones may be kept.
TEST_P(ManyInvalidConnections, OpenAndClose_PeerIsServedAndMemoryIsBounded) {
  const auto open_and_close = [](const verbatim::wire::Handle& handle, std::size_t times) {
    verbatim::wire::Secret wrong = handle.secret;
    wrong.front() ^= 0x80;
    const std::vector<std::uint8_t> hello = make_hello(wrong);
    for (std::size_t i = 0; i < times; ++i) send_bytes(connect_tcp(handle), {hello.data(), 1 + i % hello.size()});
    return std::vector<verbatim::UniqueFd>();
  };
  expect_peer_is_served([&](const verbatim::wire::Handle& handle) { return open_and_close(handle, 500); });
  const std::size_t heap = mallinfo2().uordblks;
  for (int round = 0; round < 4; ++round) {
    expect_peer_is_served([&](const verbatim::wire::Handle& handle) { return open_and_close(handle, 500); });
  }
  // The last connections may still be open, and on a loaded machine the closed ones not yet destroyed.
  const std::size_t most = heap + (1 << 20);
  for (int i = 0; i < 1000 && mallinfo2().uordblks >= most; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LT(mallinfo2().uordblks, most);
}

// A recorded hello that is sent again after its listen comm is closed must be rejected.
TEST_P(InvalidConnections, ReplayAfterListenClosed_IsRejected) {
  const End end{context(), 0};
  Handle handle;
  void* const listen_comm = listen(end, handle);
  ASSERT_NE(listen_comm, nullptr);
  const verbatim::wire::Handle before = decode(handle);
  TestConnection link = Conformance::connect(listen_comm, end, handle);
  Handle other;  // another listen comm keeps the port open
  void* const other_comm = listen(end, other);
  ASSERT_NE(other_comm, nullptr);
  service().run([&] { EXPECT_OK(net().close_listen(listen_comm)); });
  const verbatim::UniqueFd replay = connect_tcp(before);
  send_bytes(replay, make_hello(before.secret));
  std::uint8_t byte = 0;
  ssize_t received = -1;
  EXPECT_TRUE(eventually([&] {
    void* recv_comm = nullptr;
    EXPECT_OK(net().accept(other_comm, &recv_comm));
    EXPECT_EQ(recv_comm, nullptr);
    received = ::recv(replay.get(), &byte, 1, MSG_DONTWAIT);
    return received >= 0 || errno == ECONNRESET;
  }));
  EXPECT_LE(received, 0) << "the replayed hello got a reply";
  service().run([&] { EXPECT_OK(net().close_listen(other_comm)); });
  exchange_one(link, 1000);
}

// A process that has recorded a hello, and sends it before the peer does, gets the reply, and cannot answer.
TEST_P(InvalidConnections, HelloWithoutTheSessionKey_IsNotAccepted) {
  const std::vector<std::uint8_t> none = verbatim::wire::encode_ready();
  for (const auto& ready : {none, verbatim::wire::with_mac(none, verbatim::wire::Key{})}) {
    const End end{context(), 0};
    Handle handle;
    void* const listen_comm = listen(end, handle);
    ASSERT_NE(listen_comm, nullptr);
    const verbatim::UniqueFd socket = connect_tcp(decode(handle));
    send_bytes(socket, make_hello(decode(handle).secret));
    verbatim::IncomingMessage reply;
    EXPECT_TRUE(eventually([&] {
      void* recv_comm = nullptr;
      EXPECT_OK(net().accept(listen_comm, &recv_comm));
      pollfd waits{socket.get(), POLLIN, 0};
      if (::poll(&waits, 1, 0) != 1) return false;
      const verbatim::Result<bool> received = reply.receive(socket);
      return received && *received;
    }));
    EXPECT_EQ(reply.type(), verbatim::wire::MessageType::kAccept);
    send_bytes(socket, ready);
    EXPECT_TRUE(eventually([&] {
      void* recv_comm = nullptr;
      const nccl::Result result = net().accept(listen_comm, &recv_comm);
      EXPECT_EQ(recv_comm, nullptr);
      return result != nccl::Result::kSuccess;
    }));
    service().run([&] { EXPECT_OK(net().close_listen(listen_comm)); });
  }
  take_warnings();
}

TEST_P(InvalidConnections, TwoListens_HaveDifferentSecrets) {
  const End end{context(), 0};
  Handle a;
  Handle b;
  void* const listen_a = listen(end, a);
  void* const listen_b = listen(end, b);
  EXPECT_NE(decode(a).secret, decode(b).secret);
  EXPECT_NE(decode(a).secret, verbatim::wire::Secret{});
  service().run([&] {
    EXPECT_OK(net().close_listen(listen_a));
    EXPECT_OK(net().close_listen(listen_b));
  });
}

}  // namespace
}  // namespace conformance
