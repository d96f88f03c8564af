//: in rma_ranks

// TCP connections that reach a rank and do not show its secret, and what a rank that knows the secret sends too early.
// Each rank is a process: rank 1 is the one that is attacked, from the process of rank 0.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/socket.h"
#include "base/unique_fd.h"
#include "channel/incoming_message.h"
#include "rma/ranks.h"
#include "wire/authentication.h"
#include "wire/handle.h"
#include "wire/rma.h"

namespace rma_test {
namespace {

using Bytes = std::vector<std::uint8_t>;
namespace wire = verbatim::wire;
using verbatim::UniqueFd;

constexpr int kConnections = 400;

wire::Handle handle_of(const Rank& rank, int number) {
  const auto handle = wire::decode_handle(std::span<const std::uint8_t, wire::kHandleBytes>(
      static_cast<const std::uint8_t*>(rank.handle(number)), wire::kHandleBytes));
  return handle ? *handle : wire::Handle{};
}

// The kernel of the other process completes the connection.
UniqueFd connection_to(const sockaddr_storage& address) {
  UniqueFd socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0)
      << std::strerror(errno);
  return socket;
}

bool send_all(const UniqueFd& socket, std::span<const std::uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

Bytes hello_to(const wire::Handle& other, wire::RmaHello hello, const wire::PublicKey& key = {9}) {
  hello.listen = wire::listen_id(other.secret);
  hello.key = key;
  return wire::with_mac(wire::encode_rma_hello(wire::MessageType::kConnect, hello), wire::hello_key(other.secret));
}

// The test takes the place of this rank's listener, before others read the handle. accept waits.
UniqueFd listen_instead_of(const Rank& rank) {
  wire::Handle own = handle_of(rank, rank.number());
  verbatim::set_port(own.address, 0);
  verbatim::Result<UniqueFd> listener = verbatim::tcp_listen(own.address);
  EXPECT_TRUE(listener);
  if (!listener) return {};
  own.address = *verbatim::local_address(*listener);
  wire::encode_handle(own, std::span<std::uint8_t, wire::kHandleBytes>(
                               static_cast<std::uint8_t*>(rank.handle(rank.number())), wire::kHandleBytes));
  EXPECT_EQ(::fcntl(listener->get(), F_SETFL, 0), 0);
  return std::move(*listener);
}

// Of a hello to an unknown listen: up to the last byte before that is known.
Bytes beginning_of_hello() {
  Bytes message = wire::encode_rma_hello(wire::MessageType::kConnect, {});
  message.resize(wire::kHeaderBytes + sizeof(wire::ConnectionId) - 1);
  return message;
}

// Until the kernel has sent the first packet of a connection to `address`, which is not answered.
void await_refused_connect(const sockaddr_storage& address) {
  char remote[16];
  std::snprintf(remote, sizeof remote, ":%04X 02 ", ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port));
  while (true) {
    std::ifstream table("/proc/self/net/tcp");
    for (std::string line; std::getline(table, line);) {
      if (line.find(remote) != std::string::npos) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

class RmaListener : public ::testing::Test {
 protected:
  RmaListener() {
    ::setenv("VERBATIM_CONNECT_TIMEOUT_S", "20", 1);
    rlimit descriptors{};
    ::getrlimit(RLIMIT_NOFILE, &descriptors);
    descriptors.rlim_cur = descriptors.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &descriptors);
  }
  ~RmaListener() override { ::unsetenv("VERBATIM_CONNECT_TIMEOUT_S"); }

  // Both ranks connect, put and close. Before that rank 0 calls `others` with the address of rank 1.
  void run(const std::function<void(const sockaddr_storage&)>& others) {
    const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
      rank.keep_warnings();
      rank.start();
      if (rank.number() == 0) others(handle_of(rank, 1).address);
      rank.barrier();
      rank.connect();
      ASSERT_NE(rank.coll, nullptr);
      rank.create({.contexts = 1});
      Words words(512);
      void* const memory = rank.register_memory(words.data(), words.bytes());
      EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, rank.next())));
      rank.close();
    });
    for (const int rank : {0, 1}) {
      EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], 0) << ranks_.text(rank);
      EXPECT_STREQ(ranks_.text(rank), "");
    }
  }
  // The same, with many connections that have sent `first` and stay open.
  void run_beside_connections(const Bytes& first) {
    std::deque<UniqueFd> sockets;
    run([&](const sockaddr_storage& address) {
      for (int i = 0; i < kConnections; ++i) {
        sockets.push_back(connection_to(address));
        EXPECT_TRUE(send_all(sockets.back(), first));
      }
    });
  }

  Ranks ranks_{2, 14};
};

TEST_F(RmaListener, ConnectionsWithoutAByte_RanksConnect) {
  run_beside_connections({});
}

TEST_F(RmaListener, ConnectionsWithOneByte_RanksConnect) {
  run_beside_connections({'V'});
}

TEST_F(RmaListener, ConnectionsWithBeginningOfHello_RanksConnect) {
  run_beside_connections(beginning_of_hello());
}

TEST_F(RmaListener, ConnectionsAreReset_RanksConnect) {
  run([](const sockaddr_storage& address) {
    for (int i = 0; i < kConnections; ++i) {
      UniqueFd socket = connection_to(address);
      EXPECT_TRUE(send_all(socket, beginning_of_hello()));
      verbatim::close_with_reset(socket);
    }
  });
}

// The backlog of rank 1 is full while rank 0 connects, so the hello is sent late. Rank 1 has given the connection up
// meanwhile. Both are this test.
TEST_F(RmaListener, HelloIsLateAndConnectionIsReset_RankConnectsAgain) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.start();
    if (rank.number() == 0) {
      rank.barrier();
      void* handles[] = {rank.handle(0), rank.handle(1)};
      EXPECT_EQ(rank.net().connect(nullptr, handles, 2, 0, rank.listen, &rank.coll), nccl::Result::kRemoteError);
      EXPECT_OK(rank.net().close_listen(rank.listen));
      EXPECT_OK(rank.net().finalize(rank.instance));
      return;
    }
    const UniqueFd listener = listen_instead_of(rank);
    const sockaddr_storage address = handle_of(rank, 1).address;
    const UniqueFd filler = connection_to(address);
    ASSERT_EQ(::listen(listener.get(), 0), 0);        // the filler is more than that
    const timeval limit{.tv_sec = 30, .tv_usec = 0};  // of accept, which waits
    ASSERT_EQ(::setsockopt(listener.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
    rank.barrier();
    await_refused_connect(address);
    // A process that is stopped and goes on gets EINTR, because the wait has a limit.
    const auto accept = [&] {
      return UniqueFd(static_cast<int>(TEMP_FAILURE_RETRY(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))));
    };
    const auto accept_with_hello = [&] {
      UniqueFd socket = accept();
      std::uint8_t first = 0;
      EXPECT_EQ(::recv(socket.get(), &first, 1, MSG_PEEK), 1);
      return socket;
    };
    UniqueFd accepted = accept();  // the filler
    accepted = accept_with_hello();
    verbatim::close_with_reset(accepted);
    accepted = accept_with_hello();
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

// Rank 1 answers the hello of rank 0 so.
TEST_F(RmaListener, RankIsRefused_LineHasTheReason) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.start();
    const UniqueFd listener = rank.number() == 1 ? listen_instead_of(rank) : UniqueFd();
    rank.barrier();
    if (rank.number() == 0) {
      void* handles[] = {rank.handle(0), rank.handle(1)};
      EXPECT_EQ(rank.net().connect(nullptr, handles, 2, 0, rank.listen, &rank.coll), nccl::Result::kRemoteError);
    } else {
      const UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      Bytes hello(wire::kHeaderBytes);
      EXPECT_EQ(::recv(socket.get(), hello.data(), hello.size(), MSG_PEEK | MSG_WAITALL),
                static_cast<ssize_t>(hello.size()));
      EXPECT_TRUE(send_all(socket, wire::encode_reject("it is another job")));
      while (::recv(socket.get(), hello.data(), hello.size(), 0) > 0) continue;  // until rank 0 ends the connection
    }
    EXPECT_OK(rank.net().close_listen(rank.listen));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string text = ranks_.text(0);
  EXPECT_NE(text.find("failed: the peer refused the connection: it is another job. Next: look at rank 1 at "),
            std::string::npos)
      << text;
}

// Something between the ranks changes a byte of the reply. The last reply is right, and the connection ends behind it.
TEST_F(RmaListener, ReplyIsChanged_RankIsNotTakenAndLineSaysSo) {
  constexpr std::size_t kReplies = 4;
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.start();
    const UniqueFd listener = rank.number() == 1 ? listen_instead_of(rank) : UniqueFd();
    rank.barrier();
    for (std::size_t i = 1; i <= kReplies; ++i) {
      if (rank.number() == 0) {
        void* handles[] = {rank.handle(0), rank.handle(1)};
        ranks_.text(0)[0] = '\0';
        EXPECT_EQ(rank.net().connect(nullptr, handles, 2, 0, rank.listen, &rank.coll), nccl::Result::kRemoteError);
        const std::string text = ranks_.text(0);
        EXPECT_EQ(text.find("failed: handshake") != std::string::npos, i != kReplies) << text;
        EXPECT_EQ(text.find('\n'), text.size() - 1) << "it is one line: " << text;
        continue;
      }
      const UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      verbatim::IncomingMessage hello;
      verbatim::Result<bool> received(false);
      while (received && !*received) received = hello.receive(socket);
      const wire::Handle own = handle_of(rank, 1);
      const wire::Key key = wire::hello_key(own.secret);
      ASSERT_TRUE(received && hello.authenticate(key));
      const wire::ConnectionId id = wire::decode_connection_id(hello.body());
      Bytes reply = wire::encode_rma_hello(
          wire::MessageType::kAccept,
          {.listen = id.listen, .attempt = id.attempt, .key = {9}, .ranks = 2, .rank = 1, .host = "other"});
      reply = wire::with_mac(std::move(reply), key, hello.mac());
      const std::size_t changed[] = {wire::kHeaderBytes, wire::kHeaderBytes + sizeof id, reply.size() - 1};
      if (i != kReplies) reply[changed[i - 1]] ^= 1;
      EXPECT_TRUE(send_all(socket, reply));
    }
    EXPECT_OK(rank.net().close_listen(rank.listen));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

// A rank says why it does not take another one, and goes on.
TEST_F(RmaListener, HelloOfAnotherNumberOfRanks_IsRefusedWithReason) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.start();
    UniqueFd socket;
    if (rank.number() == 0) {
      const wire::Handle other = handle_of(rank, 1);
      socket = connection_to(other.address);
      EXPECT_TRUE(send_all(socket, hello_to(other, {.attempt = 1, .ranks = 3, .host = "other"})));
    }
    rank.connect();
    EXPECT_NE(rank.coll, nullptr);
    if (rank.number() == 0) {
      Bytes expected = wire::encode_reject("rank 1 of 2 does not expect it");
      Bytes received(expected.size());
      EXPECT_EQ(::recv(socket.get(), received.data(), received.size(), MSG_WAITALL),
                static_cast<ssize_t>(expected.size()));
      EXPECT_EQ(received, expected);
    }
    rank.close();
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

// No session key can be made with it.
TEST_F(RmaListener, HelloWithoutPublicKey_RanksConnect) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.start();
    UniqueFd socket;
    if (rank.number() == 0) {
      const wire::Handle other = handle_of(rank, 1);
      socket = connection_to(other.address);
      EXPECT_TRUE(send_all(socket, hello_to(other, {.attempt = 1, .ranks = 2, .rank = 0, .host = "other"}, {})));
      std::uint8_t byte = 0;
      rank.barrier();
      EXPECT_EQ(::recv(socket.get(), &byte, 1, 0), 0);
    } else {
      rank.barrier();
    }
    rank.connect();
    EXPECT_NE(rank.coll, nullptr);
    rank.close();
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

// The key that the operator has given to the host of this rank.
void set_psk(const Rank& rank, char key) {
  const std::string path =
      testing::TempDir() + "psk-" + std::to_string(::getpid()) + "-" + std::to_string(rank.number());
  std::ofstream(path) << std::string(16, key);
  ::setenv("VERBATIM_PSK_FILE", path.c_str(), 1);
}

TEST_F(RmaListener, SameKeyOfTheOperator_RanksConnect) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    set_psk(rank, 'k');
    rank.start();
    rank.connect();
    EXPECT_NE(rank.coll, nullptr);
    rank.close();
    EXPECT_EQ(::unlink(::getenv("VERBATIM_PSK_FILE")), 0);
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

TEST_F(RmaListener, OtherKeyOfTheOperator_BothSayWhy) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    set_psk(rank, static_cast<char>('k' + rank.number()));
    rank.start();
    void* handles[] = {rank.handle(0), rank.handle(1)};
    if (rank.number() == 0) {
      EXPECT_EQ(rank.net().connect(nullptr, handles, 2, 0, rank.listen, &rank.coll), nccl::Result::kRemoteError);
      EXPECT_OK(rank.net().close_listen(rank.listen));
      EXPECT_OK(rank.net().finalize(rank.instance));
      set_psk(rank, 'l');  // as rank 1, which still waits
      EXPECT_OK(rank.net().init(4711, &rank.instance));
      EXPECT_OK(rank.net().listen(rank.instance, 0, rank.handle(0), &rank.listen));
    }
    EXPECT_OK(rank.net().connect(nullptr, handles, 2, rank.number(), rank.listen, &rank.coll));
    EXPECT_OK(rank.net().close_listen(rank.listen));
    rank.close();
    EXPECT_EQ(::unlink(::getenv("VERBATIM_PSK_FILE")), 0);
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string refused = ranks_.text(0);
  EXPECT_NE(refused.find("the peer refused the connection: VERBATIM_PSK_FILE is not the same at both ends"),
            std::string::npos)
      << refused;
  const std::string refuses = ranks_.text(1);
  EXPECT_NE(refuses.find("give all hosts of the job the same VERBATIM_PSK_FILE"), std::string::npos) << refuses;
}

TEST_F(RmaListener, EachListen_HasASecretOfItsOwn) {
  const std::vector<int> statuses = ranks_.run_processes([](Rank& rank) {
    rank.start();
    std::set<wire::Secret> known{wire::Secret{}, handle_of(rank, 0).secret, handle_of(rank, 1).secret};
    EXPECT_EQ(known.size(), 3U);
    for (int init = 0; init < 2; ++init) {
      rank.barrier();
      EXPECT_OK(rank.net().close_listen(rank.listen));
      EXPECT_OK(rank.net().finalize(rank.instance));
      EXPECT_OK(rank.net().init(4711, &rank.instance));
      EXPECT_OK(rank.net().listen(rank.instance, 0, rank.handle(rank.number()), &rank.listen));
      EXPECT_TRUE(known.insert(handle_of(rank, rank.number()).secret).second);
    }
    EXPECT_OK(rank.net().close_listen(rank.listen));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

TEST_F(RmaListener, ListenIsUsedTwice_RanksConnectTwice) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.start();
    void* handles[] = {rank.handle(0), rank.handle(1)};
    void* second = nullptr;
    EXPECT_OK(rank.net().connect(nullptr, handles, 2, rank.number(), rank.listen, &rank.coll));
    EXPECT_OK(rank.net().connect(nullptr, handles, 2, rank.number(), rank.listen, &second));
    EXPECT_OK(rank.net().close_listen(rank.listen));
    EXPECT_OK(rank.net().close_coll(second));
    rank.close();
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

// Rank 0 has the secret, and sends messages about lanes of contexts that rank 1 has not made.
TEST_F(RmaListener, MessagesAboutLanesComeTooEarly_AreRefused) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.keep_warnings();
    rank.start();
    if (rank.number() == 1) {
      rank.connect();
      ASSERT_NE(rank.coll, nullptr);
      EXPECT_EQ(rank.net().create_context(rank.coll, {.contexts = 1}, &rank.contexts), nccl::Result::kRemoteError);
      EXPECT_OK(rank.net().close_coll(rank.coll));
      EXPECT_OK(rank.net().finalize(rank.instance));
      return;
    }
    const wire::Handle other = handle_of(rank, 1);
    const UniqueFd socket = connection_to(other.address);
    const verbatim::Result<wire::KeyPair> keys = wire::make_key_pair();
    ASSERT_TRUE(keys);
    const Bytes hello = hello_to(other, {.ranks = 2, .rank = 0, .host = "other"}, keys->sent);
    EXPECT_TRUE(send_all(socket, hello));
    verbatim::IncomingMessage welcome;
    verbatim::Result<bool> received(false);
    while (received && !*received) received = welcome.receive(socket);
    const wire::Key key = wire::hello_key(other.secret);
    ASSERT_TRUE(received && welcome.authenticate(key, wire::mac_of(hello)));
    const verbatim::Result<wire::RmaHello> peer = wire::decode_rma_hello(welcome.body());
    ASSERT_TRUE(peer);
    const auto shared = wire::shared_key(*keys, peer->key);
    ASSERT_TRUE(shared);
    const wire::Key session = wire::session_key(key, *shared, wire::mac_of(hello), welcome.mac());
    std::uint64_t sequence = 0;
    const auto say = [&](const Bytes& message) {
      const wire::MessageContext context = wire::message_context(1, sequence++);
      return send_all(socket, wire::with_mac(message, wire::channel_key(session, 1, 0), context));
    };
    EXPECT_TRUE(say(wire::encode_rma_exchange({.call = wire::RmaCall::kReady, .body = {1}})));
    const Bytes message = wire::encode_rma_lane({.set = 0, .psns = std::vector<std::uint32_t>(wire::kMaxRmaContexts)});
    for (int i = 0; i < 200 && say(message); ++i) continue;  // 3 MiB
    Bytes answer(4096);                                      // until that process ends the connection
    while (::recv(socket.get(), answer.data(), answer.size(), 0) > 0) continue;
    EXPECT_OK(rank.net().close_listen(rank.listen));
    EXPECT_OK(rank.net().finalize(rank.instance));
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string text = ranks_.text(1);
  EXPECT_NE(text.find("more messages about lanes than a rank sends"), std::string::npos) << text;
}

}  // namespace
}  // namespace rma_test
