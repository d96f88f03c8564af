#include "net/connect/connector.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "net/connect/listen_comm.h"
#include "support/fake_verbs.h"
#include "support/log_capture.h"

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
