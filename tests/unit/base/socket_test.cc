#include "base/socket.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

namespace {

int g_accept_errno = 0;  // the next accept4 fails with this errno; 0: accept4 calls the kernel

}  // namespace

// Replaces libc's accept4, for errors that a test cannot make the kernel return.
extern "C" int accept4(int socket, sockaddr* address, socklen_t* bytes, int flags) {
  if (g_accept_errno == 0) return static_cast<int>(::syscall(SYS_accept4, socket, address, bytes, flags));
  errno = std::exchange(g_accept_errno, 0);
  return -1;
}

namespace verbatim {
namespace {

sockaddr_storage ipv4(const char* host, std::uint16_t port) {
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  ::inet_pton(AF_INET, host, &v4.sin_addr);
  return address;
}

struct Pair {
  UniqueFd client;
  UniqueFd server;
};

Pair connected_pair() {
  Result<UniqueFd> listener = tcp_listen(ipv4("127.0.0.1", 0));
  EXPECT_TRUE(listener);
  Result<UniqueFd> client = tcp_connect(*local_address(*listener), ipv4("127.0.0.1", 99));
  EXPECT_TRUE(client);
  while (!*tcp_connected(*client)) std::this_thread::yield();
  while (true) {
    Result<std::optional<UniqueFd>> server = tcp_accept(*listener);
    EXPECT_TRUE(server);
    if (server->has_value()) return {std::move(*client), std::move(**server)};
  }
}

TEST(Socket, AcceptWithoutConnection_IsNoError) {
  Result<UniqueFd> listener = tcp_listen(ipv4("127.0.0.1", 0));
  ASSERT_TRUE(listener);
  const Result<std::optional<UniqueFd>> accepted = tcp_accept(*listener);
  ASSERT_TRUE(accepted);
  EXPECT_FALSE(accepted->has_value());
}

TEST(Socket, TransientAcceptError_IsNoError) {
  Result<UniqueFd> listener = tcp_listen(ipv4("127.0.0.1", 0));
  ASSERT_TRUE(listener);
  for (const int passing : {ECONNABORTED, EPERM}) {
    g_accept_errno = passing;
    const Result<std::optional<UniqueFd>> accepted = tcp_accept(*listener);
    ASSERT_EQ(g_accept_errno, 0) << "accept4 was not called";
    ASSERT_TRUE(accepted) << std::strerror(passing);
    EXPECT_FALSE(accepted->has_value());
  }
  for (const int error : {EMFILE, ENFILE, ENOBUFS, ENOMEM, EBADF}) {
    g_accept_errno = error;
    const Result<std::optional<UniqueFd>> accepted = tcp_accept(*listener);
    ASSERT_FALSE(accepted) << std::strerror(error);
    EXPECT_EQ(accepted.error().sys_errno, error);
  }
}

TEST(Socket, ConnectedPair_HasMatchingAddresses) {
  const Pair pair = connected_pair();
  EXPECT_EQ(to_string(*local_address(pair.client)), to_string(*remote_address(pair.server)));
}

TEST(Socket, MessageLargerThanSocketBuffer_IsSentInParts) {
  const Pair pair = connected_pair();
  std::vector<std::uint8_t> bytes(8 << 20);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 2654435761U >> 13);
  OutgoingMessage message(bytes);
  std::vector<std::uint8_t> received(bytes.size());
  std::size_t filled = 0;
  bool sent = false;
  int partial = 0;
  while (filled < received.size()) {
    if (!sent) {
      const Result<bool> all = message.send(pair.client);
      ASSERT_TRUE(all);
      sent = *all;
      partial += sent ? 0 : 1;
    }
    ASSERT_TRUE(receive_into(pair.server, received, filled));
  }
  EXPECT_TRUE(sent);
  EXPECT_GT(partial, 0);
  EXPECT_EQ(received, bytes);
}

TEST(Socket, EndOfFile_IsRemoteError) {
  Pair pair = connected_pair();
  pair.client.reset();
  std::array<std::uint8_t, 4> buffer{};
  std::size_t filled = 0;
  Result<bool> received = false;
  while (received && !*received) received = receive_into(pair.server, buffer, filled);
  ASSERT_FALSE(received);
  EXPECT_EQ(received.error().kind, ErrorKind::kRemote);
}

TEST(Socket, ConnectWithoutListener_IsRemoteError) {
  Result<UniqueFd> listener = tcp_listen(ipv4("127.0.0.1", 0));
  ASSERT_TRUE(listener);
  const sockaddr_storage address = *local_address(*listener);
  listener->reset();
  Result<UniqueFd> client = tcp_connect(address, {});
  Error error;
  if (client) {
    Result<bool> connected = false;
    while (connected && !*connected) connected = tcp_connected(*client);
    ASSERT_FALSE(connected);
    error = connected.error();
  } else {
    error = client.error();
  }
  EXPECT_EQ(error.kind, ErrorKind::kRemote);
  EXPECT_EQ(error.sys_errno, ECONNREFUSED);
}

TEST(Socket, Keepalive_EndsWithinItsTime) {
  Pair pair = connected_pair();
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t bytes = sizeof value;
    EXPECT_EQ(::getsockopt(pair.client.get(), level, name, &value, &bytes), 0);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 0);
  for (const int seconds : {1, 2, 5, 300, 86'400}) {
    set_keepalive(pair.client, static_cast<unsigned>(seconds));
    EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
    EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), seconds * 1000);
    const int probes_s =
        option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT);
    EXPECT_LE(option(IPPROTO_TCP, TCP_KEEPIDLE), std::max(seconds / 2, 1));
    EXPECT_LE(probes_s, std::max(seconds, 4));
    EXPECT_GE(probes_s, seconds - 3);
  }
}

TEST(Socket, Address_IsFormattedAsUsual) {
  EXPECT_EQ(to_string(ipv4("10.0.0.1", 4711)), "10.0.0.1:4711");
  sockaddr_storage address{};
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(7);
  ::inet_pton(AF_INET6, "fe80::1", &v6.sin6_addr);
  EXPECT_EQ(to_string(address), "[fe80::1]:7");
  v6.sin6_scope_id = 2;
  EXPECT_EQ(to_string(address), "[fe80::1%2]:7");
}

}  // namespace
}  // namespace verbatim
