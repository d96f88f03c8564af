#include "net/connect/connector.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "net/connect/listen_comm.h"
#include "support/relay.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

sockaddr_storage ipv4(const char* text) {
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  v4.sin_family = AF_INET;
  EXPECT_EQ(::inet_pton(AF_INET, text, &v4.sin_addr), 1);
  return address;
}

class ConnectorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    FakeDevice& device = fake_.add_device("mlx5_0");
    device.add_roce_port();
    device.attributes.max_cqe = 100000;
    device.attributes.max_qp_wr = 4096;
    device.attributes.max_sge = 4;
    Result<std::unique_ptr<Device>> opened = Device::open(fake_.table, nullptr, &device.device, false);
    ASSERT_TRUE(opened);
    device_ = std::move(*opened);
    port_.device = device_.get();
    port_.name = "mlx5_0:1";
    port_.link_layer = IBV_LINK_LAYER_ETHERNET;
    port_.speed_mbps = 100'000;
    port_.max_msg_bytes = 1U << 30;
    port_.active_mtu = IBV_MTU_4096;
    config_.qp_order = QpOrder::kNative;
    Result<sockaddr_storage> listening = listener_.add(handle_.secret);
    ASSERT_TRUE(listening);
    handle_.address = *listening;
    handle_.device_count = 1;
  }

  // Advances until the hello has arrived.
  std::vector<ConnectRequest> requests_of(Connector& connector, const LogCapture& log) {
    std::vector<ConnectRequest> requests;
    while (requests.empty() && std::chrono::steady_clock::now() < end_) {
      EXPECT_TRUE(connector.advance()) << testing::PrintToString(log.warnings());
      Result<std::vector<ConnectRequest>> found = listener_.poll(wire::listen_id(handle_.secret));
      EXPECT_TRUE(found);
      if (found) requests = std::move(*found);
    }
    return requests;
  }

  const std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  FakeVerbs fake_;
  std::unique_ptr<Device> device_;
  Port port_;
  Config config_;
  const std::string host_name_ = "node1";
  const CommSettings comm_settings_{.config = config_, .host_name = host_name_};
  EndpointPools pools_;
  EndpointPool pool_{config_, pools_};
  Listener listener_{ipv4("127.0.0.1"), {}, *wire::make_key_pair()};
  wire::Handle handle_;
};

// No interface has this address, as after it was removed: an attempt from it fails.
TEST_F(ConnectorTest, AddressOfInterfaceFails_ConnectsFromAnyAddress) {
  const LogCapture log;
  const sockaddr_storage removed = ipv4("203.0.113.7");
  const ConnectSettings settings{comm_settings_, pool_, listener_, removed, "eth7 203.0.113.7", {}, -1};
  Connector connector(settings, {&port_}, handle_, -1, 1);
  const std::vector<ConnectRequest> requests = requests_of(connector, log);
  ASSERT_EQ(requests.size(), 1U) << "the hello has arrived";
  EXPECT_TRUE(log.warnings().empty());
}

// A process that has recorded a reply, or knows no secret, is not taken for the peer.
TEST_F(ConnectorTest, ReplyToAnotherHello_Fails) {
  const wire::Key key = wire::hello_key(handle_.secret);
  for (const bool has_secret : {true, false}) {
    const LogCapture log;
    const ConnectSettings settings{comm_settings_, pool_, listener_, ipv4("127.0.0.1"), "lo 127.0.0.1", {}, -1};
    Connector connector(settings, {&port_}, handle_, -1, has_secret ? 1 : 100);
    const std::vector<ConnectRequest> requests = requests_of(connector, log);
    ASSERT_EQ(requests.size(), 1U);
    const Result<wire::Hello> hello = wire::decode_hello(requests.front().hello.body());
    ASSERT_TRUE(hello);
    wire::Mac other = requests.front().hello.mac();
    if (has_secret) other[0] ^= 1;
    const wire::Key used = has_secret ? key : wire::Key{};
    OutgoingMessage reply(wire::with_mac(wire::encode_hello(wire::MessageType::kAccept, *hello), used, other));
    ASSERT_TRUE(reply.send(requests.front().socket));
    Result<std::unique_ptr<SendComm>> comm = connector.advance();
    while (comm && *comm == nullptr && std::chrono::steady_clock::now() < end_) comm = connector.advance();
    ASSERT_FALSE(comm);
    EXPECT_EQ(comm.error().sys_errno, EPROTO);
  }
}

// One listen.
class ListeningTest : public ConnectorTest {
 protected:
  void SetUp() override {
    ConnectorTest::SetUp();
    device_->context()->ops.post_recv = [](ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) { return 0; };
    Result<std::unique_ptr<ListenComm>> listening = ListenComm::create(settings_, {&port_}, 1, handle_);
    ASSERT_TRUE(listening);
    listen_ = std::move(*listening);
  }

  const sockaddr_storage local_ = ipv4("127.0.0.1");
  const ConnectSettings settings_{comm_settings_, pool_, listener_, local_, "lo 127.0.0.1", {}, -1};
  std::unique_ptr<ListenComm> listen_;
};

// Both ends of connections between two processes.
class TwoProcessesTest : public ListeningTest {
 protected:
  struct Ends {
    std::unique_ptr<SendComm> send;
    std::unique_ptr<RecvComm> recv;
  };

  // `attempt`: the number of the hello.
  Ends connect(std::uint64_t attempt) {
    Connector connector(others_, {&port_}, handle_, -1, attempt);
    Ends ends;
    while (std::chrono::steady_clock::now() < end_ && (ends.send == nullptr || ends.recv == nullptr)) {
      relay_.pass_on();
      Result<std::unique_ptr<SendComm>> sends(nullptr);
      if (ends.send == nullptr) sends = connector.advance();
      Result<std::unique_ptr<RecvComm>> receives = listen_->accept();
      EXPECT_TRUE(sends && receives);
      if (!sends || !receives) break;
      if (*sends != nullptr) ends.send = std::move(*sends);
      if (*receives != nullptr) ends.recv = std::move(*receives);
    }
    EXPECT_TRUE(ends.send != nullptr && ends.recv != nullptr);
    return ends;
  }

  test::Relay relay_;
  Listener other_listener_{ipv4("127.0.0.1"), {}, *wire::make_key_pair()};
  const ConnectSettings others_{comm_settings_, pool_, other_listener_, local_, "lo 127.0.0.1", {}, -1};
};

TEST_F(TwoProcessesTest, EachConnection_HasASessionKeyThatBothEndsHave) {
  std::set<wire::Key> known{wire::Key{}};
  for (const std::uint64_t attempt : {1U, 2U}) {
    const Ends ends = connect(attempt);
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(ends.send->channel().session(), ends.recv->channel().session());
    EXPECT_TRUE(known.insert(ends.send->channel().session()).second) << "it is zero, or that of another connection";
  }
}

// The test is the network between the ends of a connection, and the monitor of both.
class RecordedConnectionTest : public TwoProcessesTest {
 protected:
  using Bytes = std::vector<std::uint8_t>;

  static std::vector<Bytes> messages_of(const Bytes& stream) {
    std::vector<Bytes> messages;
    for (auto at = stream.begin(); at != stream.end();) {
      const auto header =
          wire::decode_header(std::span<const std::uint8_t, wire::kHeaderBytes>(at, wire::kHeaderBytes));
      EXPECT_TRUE(header);
      if (!header) break;
      const auto end = at + static_cast<std::ptrdiff_t>(wire::kHeaderBytes + header->body_bytes);
      messages.emplace_back(at, end);
      at = end;
    }
    return messages;
  }

  // Without the handshake before it.
  static Bytes side_channel_of(const Bytes& stream) {
    Bytes found;
    for (const Bytes& message : messages_of(stream)) {
      const auto header = wire::decode_header(std::span(message).first<wire::kHeaderBytes>());
      if (!found.empty() || header->type == wire::MessageType::kAck)
        found.insert(found.end(), message.begin(), message.end());
    }
    return found;
  }

  struct End {
    EventLoop loop;
    EventHandler handler{loop, [](int) {}};
    std::vector<SocketInterface> interfaces;
    Channel::Process process{handler, interfaces};
    std::vector<wire::Address> peer;
    std::unique_ptr<Comm> comm;
    std::uint32_t sent = 0;
    std::uint32_t received = 0;

    Channel& channel() const { return comm->channel(); }
  };

  void SetUp() override {
    TwoProcessesTest::SetUp();
    listening_ = {wire::to_sockaddr(other_listener_.addresses(Listener::Use::kHold).at(0)), handle_.address};
    handle_.address = relay_.add(1, listening_[1]);
    Ends made = connect(1);
    ASSERT_FALSE(HasFailure());
    ends_[0].peer = {wire::to_address(handle_.address)};
    ends_[0].comm = std::move(made.send);
    ends_[1].peer = {wire::to_address(relay_.add(0, listening_[0]))};
    ends_[1].comm = std::move(made.recv);
    for (const std::size_t i : {0U, 1U}) {
      const wire::Hello& remote = ends_[i].comm->endpoint().remote();
      const wire::ConnectionEnd own{{remote.listen, remote.attempt}, 1 - i};
      ASSERT_TRUE(ends_[i].loop.open());
      ASSERT_TRUE(ends_[i].channel().open(ends_[i].process, {own, ends_[i].peer}));
      listeners_[i]->add_connection(own, ends_[i].channel().session(), 0);
    }
  }
  void TearDown() override {
    for (const End& end : ends_) {
      if (end.comm != nullptr) end.channel().stop();
    }
  }

  template <class Condition>
  void await(Condition condition) const {
    while (!condition()) {
      ASSERT_LT(std::chrono::steady_clock::now(), end_);
      std::this_thread::yield();
    }
  }

  // Each end gets a message of the other one.
  void converse() {
    for (const std::size_t i : {0U, 1U}) {
      End& end = ends_[1 - i];
      ASSERT_TRUE(ends_[i].channel().send(wire::Notice::lane_down({.lane = 0, .round = ends_[i].sent++})));
      await([&] {
        relay_.pass_on();
        const Result<std::optional<Channel::Message>> message = end.channel().receive();
        EXPECT_TRUE(message);
        if (!message || !*message) return !message;
        if ((*message)->type != wire::MessageType::kLaneDown) return false;
        EXPECT_EQ(wire::decode<wire::LaneDown>((*message)->body)->round, end.received++);
        return true;
      });
      end.channel().flush();
    }
  }
  // This end asks for a new TCP connection. The other one takes it, and its answer is still under way.
  void ask(std::size_t asks) {
    Channel& channel = ends_[asks].channel();
    now_ += 2 * kNanosecondsPerSecond;
    if (channel.is_open()) {
      ASSERT_TRUE(channel.lose(now_));
    }
    now_ = std::max(now_, channel.due_ns());
    channel.advance(now_);
    bool is_taken = false;
    await([&] {
      EXPECT_EQ(channel.ready(now_), Channel::Change::kNone);
      relay_.pass_on();
      for (Listener::Resumed& one : listeners_[1 - asks]->take_resumed([](int) {})) {
        is_taken = ends_[1 - asks].channel().accept(std::move(one.socket), one.number, now_) == Channel::Change::kNew;
      }
      return is_taken;
    });
  }
  // The end that has asked gets bytes, and does not take them for the answer.
  void expect_no_answer(std::size_t asks, const Bytes& bytes) {
    relay_.send_to(asks, bytes);
    await([&] {
      EXPECT_EQ(ends_[asks].channel().ready(now_), Channel::Change::kNone);
      return ends_[asks].channel().due_ns() < now_ + kNanosecondsPerSecond;
    });
  }
  void make_again() {
    ASSERT_NO_FATAL_FAILURE(ask(0));
    await([&] {
      relay_.pass_on();
      return ends_[0].channel().ready(now_) == Channel::Change::kNew;
    });
  }
  // An end gets bytes in the place of the peer's next message, and does not take one.
  void expect_no_message(std::size_t end, const Bytes& bytes) {
    relay_.send_to(end, bytes);
    await([&] {
      const Result<std::optional<Channel::Message>> message = ends_[end].channel().receive();
      EXPECT_TRUE(!message || !*message);
      return !message || *message;
    });
  }
  std::vector<Bytes> recorded() const {
    std::vector<Bytes> streams;
    for (const test::Relay::Connection& connection : relay_.connections()) {
      streams.insert(streams.end(), connection.passed_on.begin(), connection.passed_on.end());
    }
    return streams;
  }

  std::array<End, 2> ends_;  // the first one has connected
  std::array<Listener*, 2> listeners_{&other_listener_, &listener_};
  std::array<sockaddr_storage, 2> listening_{};
  std::uint64_t now_ = kNanosecondsPerSecond;
};

TEST_F(RecordedConnectionTest, PlayedToTheListeners_NobodyJoinsOrResumes) {
  ASSERT_NO_FATAL_FAILURE(converse());
  ASSERT_NO_FATAL_FAILURE(make_again());
  ASSERT_NO_FATAL_FAILURE(converse());
  for (const Bytes& stream : recorded()) {
    for (const std::size_t end : {0U, 1U}) {
      const Result<UniqueFd> stranger = tcp_connect(listening_[end], {});
      ASSERT_TRUE(stranger);
      await([&] { return *tcp_connected(*stranger); });
      ASSERT_TRUE(*OutgoingMessage(stream).send(*stranger));
      ssize_t answered = 0;
      await([&] {
        const Result<std::unique_ptr<RecvComm>> joined = listen_->accept();
        EXPECT_TRUE(joined && *joined == nullptr);
        EXPECT_TRUE(listeners_[end]->take_resumed([](int) {}).empty());
        std::uint8_t byte = 0;
        answered = ::recv(stranger->get(), &byte, 1, MSG_DONTWAIT);
        return answered >= 0 || errno != EAGAIN;
      });
      EXPECT_LE(answered, 0);
    }
  }
  converse();
}

TEST_F(RecordedConnectionTest, PlayedToTheEnds_NoMessageIsTaken) {
  ASSERT_NO_FATAL_FAILURE(converse());
  ASSERT_NO_FATAL_FAILURE(make_again());
  ASSERT_NO_FATAL_FAILURE(converse());
  std::vector<Bytes> streams = recorded();
  ASSERT_EQ(streams.size(), 4U);
  std::ranges::reverse(streams);  // the first request of the other end has the number of a recorded one
  for (const Bytes& stream : streams) {
    for (const std::size_t asks : {1U, 0U}) {
      ASSERT_NO_FATAL_FAILURE(ask(asks));
      ASSERT_NO_FATAL_FAILURE(expect_no_message(1 - asks, side_channel_of(stream)));
      ASSERT_NO_FATAL_FAILURE(expect_no_answer(asks, side_channel_of(stream)));
    }
    for (const Bytes& message : messages_of(stream)) {
      for (const std::size_t end : {0U, 1U}) {
        ASSERT_NO_FATAL_FAILURE(make_again());
        ASSERT_NO_FATAL_FAILURE(converse());
        ASSERT_NO_FATAL_FAILURE(expect_no_message(end, message));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(ask(0));
  ASSERT_NO_FATAL_FAILURE(expect_no_message(1, relay_.take(1)));  // what it has just sent
  ASSERT_NO_FATAL_FAILURE(expect_no_answer(0, side_channel_of(streams.front())));
  ASSERT_NO_FATAL_FAILURE(make_again());
  converse();
}

// Moves to RTR fail with ETIMEDOUT. One test at a time.
struct Resolution {
  decltype(&ibv_modify_qp) modify_qp = nullptr;
  std::vector<std::uint32_t> attempts;  // the QPs
};
Resolution* g_resolution = nullptr;

int modify_qp_unresolved(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  if ((mask & IBV_QP_STATE) == 0 || attributes->qp_state != IBV_QPS_RTR) {
    return g_resolution->modify_qp(qp, attributes, mask);
  }
  g_resolution->attempts.push_back(qp->qp_num);
  errno = ETIMEDOUT;
  return ETIMEDOUT;
}

// One listen, which cannot resolve the addresses of the peers that connect to it.
class UnresolvedAcceptTest : public ListeningTest {
 protected:
  void SetUp() override {
    ListeningTest::SetUp();
    g_resolution = &resolution_;
    resolution_.modify_qp = std::exchange(fake_.table.modify_qp, modify_qp_unresolved);
  }

  void connect(std::size_t peers) {
    for (std::size_t i = 0; i < peers; ++i) {
      peers_.push_back(std::make_unique<Connector>(settings_, std::vector<const Port*>{&port_}, handle_, -1, i));
    }
  }
  // Polls all until `condition` or an error of accept, which is returned.
  template <class Condition>
  std::optional<Error> accept_until(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "not in time";
        break;
      }
      for (const auto& peer : peers_) EXPECT_TRUE(peer->advance());
      const std::size_t before = attempts();
      const Result<std::unique_ptr<RecvComm>> accepted = listen_->accept();
      EXPECT_LE(attempts() - before, 1U) << "each may block for a second";
      if (!accepted) return accepted.error();
      EXPECT_EQ(*accepted, nullptr);
    }
    return std::nullopt;
  }
  std::size_t attempts() const { return resolution_.attempts.size(); }

  const LogCapture log_;
  Resolution resolution_;
  std::vector<std::unique_ptr<Connector>> peers_;
};

TEST_F(UnresolvedAcceptTest, SeveralPeers_OneAttemptPerCallInTurns) {
  connect(3);
  const auto different = [&](std::size_t first) {
    return std::set<std::uint32_t>(resolution_.attempts.begin() + static_cast<std::ptrdiff_t>(first),
                                   resolution_.attempts.end())
        .size();
  };
  EXPECT_FALSE(accept_until([&] { return different(0) == 3; }));
  // After the longest pause all are due: the first peer must not use each call for itself.
  const std::size_t first = attempts();
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    const std::size_t before = attempts();
    EXPECT_FALSE(accept_until([&] { return attempts() > before; }));
  }
  EXPECT_EQ(attempts(), first + 3);
  EXPECT_EQ(different(first), 3U);
}

// The reserve is longer than the timeout: the first attempt comes after its begin.
TEST_F(UnresolvedAcceptTest, FirstAttemptIsLate_IsRepeated) {
  config_.connect_timeout_s = 60;
  connect(1);
  EXPECT_FALSE(accept_until([&] { return attempts() == 1; }));
  config_.connect_timeout_s = 60 * 9;
  const std::optional<Error> error = accept_until([] { return false; });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->sys_errno, ETIMEDOUT);
  EXPECT_EQ(attempts(), 2U);
  EXPECT_NE(log_.only_warning().find("repeated until the deadline"), std::string::npos);
}

TEST_F(UnresolvedAcceptTest, DeadlineAfterFirstAttempt_IsNotCalledRepeated) {
  connect(1);
  config_.connect_timeout_s = 0;
  const std::optional<Error> error = accept_until([] { return false; });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->sys_errno, ETIMEDOUT);
  EXPECT_EQ(attempts(), 1U);
  EXPECT_EQ(log_.only_warning().find("repeated"), std::string::npos);
}

TEST_F(UnresolvedAcceptTest, PeerCloses_NoFurtherAttempt) {
  connect(1);
  EXPECT_FALSE(accept_until([&] { return attempts() == 1; }));
  peers_.clear();
  const std::optional<Error> error = accept_until([] { return false; });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::kRemote);
  EXPECT_NE(error->sys_errno, ETIMEDOUT);
  EXPECT_LE(attempts(), 2U) << "one may come before the end of file";
}

}  // namespace
}  // namespace verbatim
