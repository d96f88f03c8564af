//: in unit_net_lines

// The log lines of connections that cannot be established: the peer rejects them, closes them, does not answer, or is
// another service. Each case runs in a child process.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <regex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/socket.h"
#include "base/unique_fd.h"
#include "child_lines.h"
#include "connected_comms.h"
#include "support/child.h"
#include "support/log_lines.h"
#include "support/loopback.h"
#include "support/refusal.h"
#include "wire/handle.h"

namespace verbatim {
namespace {

using HandleBytes = std::array<std::uint8_t, wire::kHandleBytes>;

// Most cases end before the timeout of the handshake. Those that wait for it have a short one.
constexpr const char* kLongTimeout = "60";
constexpr const char* kShortTimeout = "2";

Lines lines_of(const std::function<void()>& body, const std::string& faults = "seed=1",
               const std::string& timeout_s = kLongTimeout) {
  test::Variables variables = with_faults(faults);
  variables.emplace_back("VERBATIM_CONNECT_TIMEOUT_S", timeout_s);
  return warnings_of(test::check_in_child(variables, body));
}

// Two contexts of this process, between which a handshake fails.
struct HandshakePair {
  HandshakePair() {
    for (Context*& context : contexts) {
      Result<Context*> opened = open_context(-1);
      EXPECT_TRUE(opened);
      if (opened) context = *opened;
    }
    Result<ListenComm*> listening = contexts[0]->listen(0, handle);
    EXPECT_TRUE(listening);
    if (listening) listen = *listening;
  }
  ~HandshakePair() {
    for (Context* context : contexts) {
      if (context != nullptr) close_context(context);
    }
  }
  void end(std::size_t which) { close_context(std::exchange(contexts[which], nullptr)); }
  Result<SendComm*> connect() { return contexts[1]->connect(0, handle, -1); }
  Result<RecvComm*> accept() { return contexts[0]->accept(*listen); }
  // Calls one side until it fails.
  void connect_until_failure() {
    EXPECT_TRUE(ConnectedComms::eventually([&] { return !connect(); }));
  }
  void accept_until_failure() {
    EXPECT_TRUE(ConnectedComms::eventually([&] { return !accept(); }));
  }

  std::array<Context*, 2> contexts{};
  HandleBytes handle{};
  ListenComm* listen = nullptr;
};

// Long enough for what was sent to arrive, also where the system is busy.
void for_a_while(const std::function<void()>& call) {
  for (int i = 0; i < 200 && !testing::Test::HasFatalFailure(); ++i) {
    call();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(HandshakeFailureLine, ConnectingPeerCloses_NamesPeer) {
  const Lines warnings = lines_of([] {
    HandshakePair pair;
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    // After this the listening side has sent its reply and waits for the peer.
    for_a_while([&] { ASSERT_TRUE(pair.accept()); });
    pair.end(1);
    pair.accept_until_failure();
  });
  test::expect_log_lines(warnings);
}

TEST(HandshakeFailureLine, ListeningPeerCloses_NamesPeer) {
  const Lines warnings = lines_of([] {
    HandshakePair pair;
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    HandleBytes handle{};
    Result<ListenComm*> other = pair.contexts[1]->listen(0, handle);  // serves the socket from here on
    ASSERT_TRUE(other);
    pair.end(0);
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      EXPECT_TRUE(pair.contexts[1]->accept(**other));
      return !pair.connect();
    }));
  });
  test::expect_log_lines(warnings);
}

TEST(HandshakeFailureLine, PeerRejects_GivesItsReason) {
  const Lines warnings = lines_of(
      [] {
        HandshakePair pair;
        EXPECT_TRUE(ConnectedComms::eventually([&] {
          static_cast<void>(pair.accept());
          return !pair.connect();
        }));
      },
      "fail verb=modify_qp nth=3 errno=EINVAL");
  test::expect_log_lines(warnings);
}

// The accepting end gives up before the deadline of the connecting end, which therefore gets the cause.
TEST(HandshakeFailureLine, AcceptingEndCannotResolve_ConnectingEndGivesItsReason) {
  const Lines warnings = lines_of(
      [] {
        HandshakePair pair;
        EXPECT_TRUE(ConnectedComms::eventually([&] {
          static_cast<void>(pair.accept());
          return !pair.connect();
        }));
      },
      "fail verb=modify_qp nth=3 count=all errno=ETIMEDOUT", "16");
  test::expect_log_lines(warnings);
}

// Four calls have moved the QPs to INIT, two the accepting end's first QP to RTS: its second QP, and then the first one
// of the connecting end, need three attempts each.
TEST(PeerAddress, NotResolvedTwice_ConnectionIsEstablished) {
  test::Variables variables = with_faults(
      "fail verb=modify_qp nth=7 count=2 errno=ETIMEDOUT; fail verb=modify_qp nth=11 count=2 errno=ETIMEDOUT");
  variables.emplace_back("VERBATIM_QPS_PER_CONNECTION", "2");
  variables.emplace_back("VERBATIM_SPLIT_DATA_ON_QPS", "1");
  const Lines warnings = warnings_of(test::check_in_child(variables, [] {
    ConnectedComms link;
    link.connect();
    const std::vector<std::uint8_t> sent = pattern(100'000, 7);
    Buffers buffers(link, sent);
    for (int i = 0; i < 100; ++i) {
      std::fill(buffers.target.begin(), buffers.target.end(), 0);
      Request* const received = link.posted([&] { return buffers.irecv(sent.size()); });
      Request* const request = link.posted([&] { return buffers.isend(sent.size()); });
      ASSERT_TRUE(link.wait(request));
      ASSERT_TRUE(link.wait(received));
      link.is_completed(request);
      link.is_completed(received);
      ASSERT_EQ(buffers.target, sent);
    }
  }));
  EXPECT_EQ(warnings, Lines());
}

// The handle of a process that has ended since.
HandleBytes handle_of_ended_process() {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    HandleBytes handle{};
    const Result<Context*> context = open_context(-1);
    const bool listens = context && (*context)->listen(0, handle);
    ::_exit(listens && ::write(ends[1], handle.data(), handle.size()) == static_cast<ssize_t>(handle.size()) ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  HandleBytes handle{};
  EXPECT_EQ(::read(ends[0], handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
  ::close(ends[0]);
  ::close(ends[1]);
  return handle;
}

TEST(HandshakeFailureLine, PeerProcessEnded_IsConnectionRefused) {
  const Lines warnings = lines_of(
      [] {
        const HandleBytes handle = handle_of_ended_process();
        HandshakePair pair;
        pair.handle = handle;
        pair.connect_until_failure();
      },
      "seed=1", kShortTimeout);
  test::expect_log_lines(warnings);
}

TEST(HandshakeFailureLine, PeerNeverAccepts_TimesOut) {
  const Lines warnings = lines_of([] { HandshakePair().connect_until_failure(); }, "seed=1", kShortTimeout);
  test::expect_log_lines(warnings);
}

TEST(HandshakeFailureLine, ConnectNotContinued_TimesOut) {
  const Lines warnings = lines_of(
      [] {
        HandshakePair pair;
        for_a_while([&] { ASSERT_TRUE(pair.connect()); });
        pair.accept_until_failure();
      },
      "seed=1", "5");  // the connecting end must not be given up meanwhile
  test::expect_log_lines(warnings);
}

// Another service, at an address of its own.
class Service {
 public:
  Service() {
    Result<UniqueFd> listening = tcp_listen(test::loopback());
    EXPECT_TRUE(listening);
    if (listening) listener_ = std::move(*listening);
  }

  // Until listen_again(), connects are refused.
  void refuse() const { test::refuse_connections(listener_.get()); }
  void listen_again() const { test::accept_connections(listener_.get()); }

  // A copy of the handle `real` with the address of this service.
  HandleBytes in_place_of(const HandleBytes& real) const {
    Result<wire::Handle> handle = wire::decode_handle(real);
    EXPECT_TRUE(handle);
    real_ = handle->address;
    handle->address = *local_address(listener_);
    HandleBytes here{};
    wire::encode_handle(*handle, here);
    return here;
  }

  // From now on the listen backlog holds one connection: that of the returned socket.
  UniqueFd fill() const {
    EXPECT_EQ(::listen(listener_.get(), 0), 0);
    Result<UniqueFd> socket = tcp_connect(*local_address(listener_), {});
    EXPECT_TRUE(socket);
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      const Result<bool> connected = tcp_connected(*socket);
      return connected && *connected;
    }));
    return std::move(*socket);
  }

  // The next connection, if there is one.
  UniqueFd poll() const {
    Result<std::optional<UniqueFd>> accepted = tcp_accept(listener_);
    EXPECT_TRUE(accepted);
    return accepted && *accepted ? std::move(**accepted) : UniqueFd();
  }
  UniqueFd next() const {
    UniqueFd client;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      client = poll();
      return client.get() >= 0;
    }));
    return client;
  }

  // Forwards the first message of `client` to the real listener.
  UniqueFd forward_hello(const UniqueFd& client) const {
    std::vector<std::uint8_t> message(wire::kHeaderBytes);
    std::size_t filled = 0;
    receive(client, message, filled);
    const auto header =
        wire::decode_header(std::span<const std::uint8_t, wire::kHeaderBytes>(message.data(), wire::kHeaderBytes));
    EXPECT_TRUE(header);
    message.resize(wire::kHeaderBytes + header->body_bytes);
    receive(client, message, filled);
    Result<UniqueFd> socket = tcp_connect(real_, {});
    EXPECT_TRUE(socket);
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      const Result<bool> connected = tcp_connected(*socket);
      return connected && *connected;
    }));
    send(*socket, message);
    return std::move(*socket);
  }

  static void send(const UniqueFd& to, std::vector<std::uint8_t> bytes) {
    OutgoingMessage message(std::move(bytes));
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      const Result<bool> sent = message.send(to);
      return !sent || *sent;
    }));
  }
  static void send(const UniqueFd& to, std::string_view text) {
    send(to, std::vector<std::uint8_t>(text.begin(), text.end()));
  }

 private:
  static void receive(const UniqueFd& from, std::span<std::uint8_t> bytes, std::size_t& filled) {
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      const Result<bool> all = receive_into(from, bytes, filled);
      EXPECT_TRUE(all);
      return !all || *all;
    }));
  }

  UniqueFd listener_;
  mutable sockaddr_storage real_{};
};

TEST(TcpConnect, RefusedAtFirst_IsRepeated) {
  const Lines warnings = lines_of([] {
    HandshakePair pair;
    Service service;
    pair.handle = service.in_place_of(pair.handle);
    service.refuse();
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    service.listen_again();
    UniqueFd client;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      EXPECT_TRUE(pair.connect());
      client = service.poll();
      return client.get() >= 0;
    }));
    Service::send(client, wire::encode_reject("no"));
    pair.connect_until_failure();
  });
  test::expect_log_lines(warnings);
}

// The listener has accepted a connection before: it is closed, and no attempt is repeated for a minute.
TEST(TcpConnect, RefusedAfterListenerAnswered_FailsAtOnce) {
  const Lines warnings = lines_of([] {
    HandshakePair pair;
    Service service;
    pair.handle = service.in_place_of(pair.handle);
    const UniqueFd filler = service.fill();
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    service.next();  // the filler: the backlog has a free entry from here on
    service.next();
    service.refuse();
    pair.connect_until_failure();
  });
  test::expect_log_lines(warnings);
}

// TCP does not connect to a broadcast address.
TEST(TcpConnect, NoRoute_NamesRouteAndInterfaces) {
  const Lines warnings = lines_of(
      [] {
        HandshakePair pair;
        Result<wire::Handle> handle = wire::decode_handle(pair.handle);
        ASSERT_TRUE(handle);
        auto& address = reinterpret_cast<sockaddr_in&>(handle->address);
        ASSERT_EQ(::inet_pton(AF_INET, "127.255.255.255", &address.sin_addr), 1);
        address.sin_port = htons(4711);
        wire::encode_handle(*handle, pair.handle);
        pair.connect_until_failure();
      },
      "seed=1", kShortTimeout);
  test::expect_log_lines(warnings);
}

// The listen backlog is full, so the kernel drops the SYN, as a firewall does.
TEST(TcpConnect, NothingAnswers_SuggestsFirewallAndNamesPort) {
  const Lines warnings = lines_of(
      [] {
        HandshakePair pair;
        const Service service;
        pair.handle = service.in_place_of(pair.handle);
        Result<wire::Handle> handle = wire::decode_handle(pair.handle);
        ASSERT_TRUE(handle);
        const UniqueFd filler = service.fill();
        pair.connect_until_failure();
      },
      "seed=1", kShortTimeout);
  ASSERT_EQ(warnings.size(), 1U);
  const std::regex port("(port|127\\.0\\.0\\.1) [0-9]+");
  test::expect_log_lines({std::regex_replace(warnings[0], port, "$1 #")});
}

// Connects the second device to the first one, with these GIDs.
Lines lines_between_gids(const std::string& first, const std::string& second) {
  test::Variables variables = with_faults("seed=1");
  variables.emplace_back("VERBATIM_GID_INDEX", "softverbs0=" + first + ",softverbs1=" + second);
  return warnings_of(test::check_in_child(variables, [] {
    HandshakePair pair;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      static_cast<void>(pair.accept());
      return !pair.contexts[1]->connect(1, pair.handle, -1);
    }));
  }));
}

TEST(HandshakeFailureLine, DifferentGidTypes_NamesBothGids) {
  test::expect_log_lines(lines_between_gids("3", "2"));
  const Lines families = lines_between_gids("3", "1");
  ASSERT_EQ(families.size(), 2U) << testing::PrintToString(families);
  for (const std::string& line : families) {
    EXPECT_NE(line.find("one end has an IPv4 GID, the other an IPv6 GID: softverbs0:1 on HOST has GID 3 "
                        "::ffff:10.77.0.1 (RoCE v2), softverbs1:1 on HOST has GID 1 fe80::"),
              std::string::npos)
        << line;
  }
}

// In a network namespace of its own, whose only interface is lo.
TEST(SideChannelInterface, OnlyLoopback_IsWarning) {
  const auto has_only_loopback = [] {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
    const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq request{};
    std::strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    return ::ioctl(socket.get(), SIOCSIFFLAGS, &request) == 0;
  };
  if (test::run_in_child({}, [&] { return has_only_loopback() ? 0 : 1; }).status != 0) {
    GTEST_SKIP() << "no permission to make a network namespace";
  }
  const auto warnings = [&](const char* interface) {
    test::Variables variables = with_faults("seed=1");
    variables.emplace_back("VERBATIM_SOCKET_IFNAME", interface);
    return warnings_of(test::check_in_child(variables, [&] {
      ASSERT_TRUE(has_only_loopback());
      const Result<Context*> context = open_context(-1);
      ASSERT_TRUE(context);
      close_context(*context);
    }));
  };
  test::expect_log_lines(warnings(""));
  EXPECT_EQ(warnings("lo"), Lines());
}

TEST(HandshakeFailureLine, OtherServiceAnswersConnect_NamesVersions) {
  const Lines warnings = lines_of([] {
    HandshakePair pair;
    const Service service;
    pair.handle = service.in_place_of(pair.handle);
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    const UniqueFd client = service.next();
    Service::send(client, "HTTP/1.1 400 Bad Request\r\n\r\n");
    pair.connect_until_failure();
  });
  test::expect_log_lines(warnings);
}

TEST(HandshakeFailureLine, OtherServiceContinuesHandshake_NamesVersions) {
  const Lines warnings = lines_of([] {
    HandshakePair pair;
    const Service service;
    pair.handle = service.in_place_of(pair.handle);
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    const UniqueFd client = service.next();
    const UniqueFd there = service.forward_hello(client);
    Service::send(there, "GET / HTTP/1.1\r\n\r\n");
    pair.accept_until_failure();
  });
  test::expect_log_lines(warnings);
}

TEST(HandshakeFailureLine, OtherRelease_SuggestsSameRelease) {
  const Lines warnings = lines_of([] {
    HandshakePair pair;
    const Service service;
    pair.handle = service.in_place_of(pair.handle);
    ++pair.handle[4];  // the version
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    Service::send(service.next(), wire::encode_reject("this end speaks another one"));
    pair.connect_until_failure();
  });
  test::expect_log_lines(warnings);
}

// The connection stays in the listen backlog, so that the hello is sent long after the connect, when the peer has
// closed it.
TEST(HandshakeFailureLine, HelloAfterPeerTimeout_IsRetried) {
  const Lines warnings = lines_of([] {
    HandshakePair pair;
    const Service service;
    pair.handle = service.in_place_of(pair.handle);
    const UniqueFd filler = service.fill();
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    service.next();  // the filler: the backlog has a free entry from here on
    service.next();
    for_a_while([&] { ASSERT_TRUE(pair.connect()); });
    Service::send(service.next(), wire::encode_reject("no"));
    pair.connect_until_failure();
  });
  test::expect_log_lines(warnings);
}

}  // namespace
}  // namespace verbatim
