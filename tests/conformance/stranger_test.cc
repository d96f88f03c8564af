// Whoever else knocks at the listening port: nobody whom it was not handed to gets in, and nobody disturbs the peer who
// was.
#include <arpa/inet.h>
#include <sys/socket.h>

#include <cstring>
#include <span>

#include "base/fd.h"
#include "conformance.h"
#include "wire/handle.h"
#include "wire/handshake.h"

namespace conformance {
namespace {

class Strangers : public Conformance {
 protected:
  static verbatim::wire::Handle decode(Handle& handle) {
    auto decoded =
        verbatim::wire::decode_handle(std::span<const std::uint8_t, verbatim::wire::kHandleBytes>(handle.bytes));
    EXPECT_TRUE(decoded);
    return decoded ? *decoded : verbatim::wire::Handle{};
  }

  static verbatim::UniqueFd knock(const verbatim::wire::Handle& handle) {
    verbatim::UniqueFd socket(::socket(handle.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const socklen_t size = handle.address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&handle.address), size), 0)
        << std::strerror(errno);
    return socket;
  }

  static void say(const verbatim::UniqueFd& socket, std::span<const std::uint8_t> bytes) {
    EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  // What `stranger` does first, and then the right peer connects and is served.
  template <typename Stranger>
  void expect_undisturbed(const Stranger& stranger) {
    const End end{context(), 0};
    Handle handle;
    void* const listen_comm = listen(end, handle);
    ASSERT_NE(listen_comm, nullptr);
    const std::vector<verbatim::UniqueFd> kept_open = stranger(decode(handle));
    void* recv_comm = nullptr;
    const auto quiet_end = Clock::now() + kQuiet;
    while (Clock::now() < quiet_end) {
      EXPECT_OK(net().accept(listen_comm, &recv_comm));
      ASSERT_EQ(recv_comm, nullptr) << "a stranger got in";
    }
    Link link = Conformance::connect(listen_comm, end, handle);
    service().run([&] { EXPECT_OK(net().close_listen(listen_comm)); });
    exchange_one(link, 1000);
    take_warnings();  // it may say so
  }

  // A hello in due form, but for the secret.
  static std::vector<std::uint8_t> forged(verbatim::wire::Secret secret) {
    verbatim::wire::Hello hello;
    hello.secret = secret;
    hello.host = "stranger";
    hello.devices.resize(1);
    hello.devices[0].name = "softverbs0";
    hello.devices[0].mtu = 5;
    hello.devices[0].port = 1;
    hello.devices[0].link_layer = 1;
    hello.devices[0].max_message_bytes = 1U << 30;
    hello.qps.resize(1);
    hello.qps[0].number = 17;
    return verbatim::wire::encode_hello(verbatim::wire::MessageType::kConnect, hello);
  }
};
EVERY_VERSION(Strangers);

TEST_P(Strangers, Silent) {
  expect_undisturbed([](const verbatim::wire::Handle& handle) {
    std::vector<verbatim::UniqueFd> sockets;
    for (int i = 0; i < 5; ++i) sockets.push_back(knock(handle));
    return sockets;
  });
}

TEST_P(Strangers, GoneAtOnce) {
  expect_undisturbed([](const verbatim::wire::Handle& handle) {
    for (int i = 0; i < 5; ++i) knock(handle);
    return std::vector<verbatim::UniqueFd>();
  });
}

TEST_P(Strangers, Garbage) {
  expect_undisturbed([](const verbatim::wire::Handle& handle) {
    std::vector<verbatim::UniqueFd> sockets;
    for (const std::uint8_t byte : {std::uint8_t{0x00}, std::uint8_t{0x47}, std::uint8_t{0xff}}) {
      sockets.push_back(knock(handle));
      say(sockets.back(), std::vector<std::uint8_t>(3000, byte));
    }
    return sockets;
  });
}

TEST_P(Strangers, StopsInTheMiddleOfAMessage) {
  expect_undisturbed([](const verbatim::wire::Handle& handle) {
    const std::vector<std::uint8_t> hello = forged(handle.secret);
    std::vector<verbatim::UniqueFd> sockets;
    for (const std::size_t size : {std::size_t{1}, verbatim::wire::kHeaderBytes, hello.size() - 1}) {
      sockets.push_back(knock(handle));
      say(sockets.back(), {hello.data(), size});
    }
    return sockets;
  });
}

TEST_P(Strangers, WrongSecret) {
  expect_undisturbed([](const verbatim::wire::Handle& handle) {
    std::vector<verbatim::UniqueFd> sockets;
    verbatim::wire::Secret near = handle.secret;
    near.back() ^= 1;
    for (const verbatim::wire::Secret& secret : {near, verbatim::wire::Secret{}}) {
      sockets.push_back(knock(handle));
      say(sockets.back(), forged(secret));
    }
    return sockets;
  });
}

TEST_P(Strangers, MessageOfAbsurdLength) {
  expect_undisturbed([](const verbatim::wire::Handle& handle) {
    std::vector<std::uint8_t> hello = forged(handle.secret);
    std::memset(hello.data() + 8, 0xff, 4);  // Header::body_bytes
    std::vector<verbatim::UniqueFd> sockets;
    sockets.push_back(knock(handle));
    say(sockets.back(), hello);
    return sockets;
  });
}

TEST_P(Strangers, SecretsDiffer) {
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
