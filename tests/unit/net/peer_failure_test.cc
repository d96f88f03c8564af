// Failures reach both ends: the notice of one end to the other, and the keepalive.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/socket.h"
#include "connected_comms.h"
#include "net/monitor/monitor.h"
#include "support/loopback.h"
#include "unit/support/log_capture.h"
#include "unit/support/peer_socket.h"

namespace verbatim {
namespace {

using Clock = std::chrono::steady_clock;

// Only the notice reports the failure so soon. The best of several tries counts: a busy machine is slow now and then, a
// missing notice is slow each time.
TEST(PeerFailure, Failure_IsReportedToPeerAtOnce) {
  constexpr std::chrono::seconds kSoon(5);
  constexpr int kTries = 5;
  auto best = Clock::duration::max();
  for (int i = 0; i < kTries && best >= kSoon; ++i) {
    ConnectedComms link;
    ASSERT_NO_FATAL_FAILURE(link.connect());
    Buffers buffers(link, 100);
    ASSERT_NE(link.posted([&] { return buffers.irecv(50); }), nullptr);
    const LogCapture log;
    ASSERT_TRUE(link.fails(link.send(), [&] { ASSERT_EQ(buffers.isend(51), nullptr); }));
    const auto failed = Clock::now();
    ASSERT_TRUE(link.fails(link.recv()));
    best = std::min(best, Clock::now() - failed);
    std::printf("the peer knew after %.0f ms\n", std::chrono::duration<double, std::milli>(best).count());
    EXPECT_EQ(link.recv().error()->kind, ErrorKind::kRemote);
    EXPECT_NE(link.recv().failure()->what.find("reported: isend of 51 bytes"), std::string::npos);
    EXPECT_EQ(log.warnings().size(), 2U);  // one at each end
  }
  EXPECT_LT(best, kSoon);
}

// Nothing is outstanding: the next call that needs the peer returns the error.
TEST(PeerFailure, IdleEnd_FailsAtNextCall) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 8);
  ASSERT_NE(buffers.irecv(8), nullptr);  // there is a CTS: only the failure stops the sender
  const LogCapture log;
  link.recv().abort();
  ASSERT_TRUE(link.fails(link.recv()));
  ASSERT_TRUE(link.eventually([&] {
    std::this_thread::yield();
    return (link.send().slow_path_flags() & Comm::kCommEvents) != 0;
  }));
  ASSERT_TRUE(link.fails(link.send(), [&] { ASSERT_EQ(buffers.isend(8), nullptr); }));
  EXPECT_EQ(link.send().error()->kind, ErrorKind::kRemote);
  EXPECT_NE(link.send().failure()->what.find(" reported: "), std::string::npos);
}

TEST(PeerFailure, CloseWithOutstandingOperation_IsReportedAsAbort) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 8);
  ASSERT_NE(buffers.irecv(8, 7), nullptr);
  const LogCapture log;
  link.context().close(link.recv());
  ASSERT_TRUE(link.fails(link.send(), [&] { ASSERT_EQ(buffers.isend(8, 8), nullptr); }));
  EXPECT_EQ(link.send().error()->kind, ErrorKind::kRemote);
  EXPECT_TRUE(link.send().failure()->what.ends_with(" aborted the connection")) << log.only_warning();
}

// One end of a connection; the test reads and writes the other end of its side channel.
class Keepalive : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kKeepaliveNs = 4 * kNanosecondsPerSecond;  // answers are due within 3 s

  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(link_.connect());
    Result<std::unique_ptr<Monitor>> control = Monitor::start({}, {.keepalive_ns = kKeepaliveNs});
    ASSERT_TRUE(control);
    control_ = std::move(*control);
    comm_ = link_.make_recv_comm(link_.ports(), 1);
    ASSERT_NE(comm_, nullptr);
    // TCP, whose kernel acknowledges what a process does not read.
    const Result<UniqueFd> listener = tcp_listen(test::loopback());
    ASSERT_TRUE(listener);
    const Result<sockaddr_storage> address = local_address(*listener);
    ASSERT_TRUE(address);
    Result<UniqueFd> own = tcp_connect(*address, {});
    ASSERT_TRUE(own);
    comm_->channel().set_socket(std::move(*own), {});
    ASSERT_TRUE(ConnectedComms::eventually([&] {
      Result<std::optional<UniqueFd>> accepted = tcp_accept(*listener);
      if (accepted && *accepted) peer_ = test::PeerSocket(std::move(**accepted), 1);
      return !!peer_;
    }));
    ASSERT_TRUE(control_->watch(*comm_, this));
  }
  void TearDown() override {
    if (control_ != nullptr) control_->unwatch(*comm_);
    control_.reset();
  }

  // The next message to the peer but kAck, within the time; kReady when there is none.
  wire::MessageType next(std::chrono::milliseconds time) {
    while (true) {
      const auto message = peer_.receive();
      if (!message) return wire::MessageType::kReady;
      if (*message && (*message)->type != wire::MessageType::kAck) return (*message)->type;
      pollfd ready{peer_.socket().get(), POLLIN, 0};
      if (!*message && ::poll(&ready, 1, static_cast<int>(time.count())) <= 0) return wire::MessageType::kReady;
    }
  }
  void say(wire::MessageType type) { ASSERT_TRUE(peer_.say(type)); }
  bool failed() {
    comm_->progress();
    return comm_->error() != nullptr;
  }

  ConnectedComms link_;
  test::PeerSocket peer_;
  std::unique_ptr<RecvComm> comm_;
  std::unique_ptr<Monitor> control_;
};

TEST_F(Keepalive, PeerDoesNotAnswer_FailsBothEnds) {
  const LogCapture log;
  const auto begin = Clock::now();
  ASSERT_TRUE(ConnectedComms::fails(*comm_, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    comm_->progress();
  }));
  std::printf("after %.0f ms\n", std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  EXPECT_EQ(comm_->error()->kind, ErrorKind::kRemote);
  EXPECT_NE(comm_->failure()->what.find("VERBATIM_KEEPALIVE_S"), std::string::npos) << log.only_warning();
  EXPECT_EQ(next(ConnectedComms::kPatience), wire::MessageType::kPing);
  wire::MessageType last = wire::MessageType::kPing;
  while (last == wire::MessageType::kPing) last = next(ConnectedComms::kPatience);
  EXPECT_EQ(last, wire::MessageType::kFailed);
}

// The acknowledgements come before the first message: the peer has one more period. The other end is a UNIX socket,
// which acknowledges what its owner reads.
TEST_F(Keepalive, AcknowledgedAfterACut_FailsOneTickLater) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  control_->unwatch(*comm_);
  comm_->channel().set_socket(UniqueFd(ends[0]), {});
  peer_ = test::PeerSocket(UniqueFd(ends[1]), 1);
  const LogCapture log;
  ASSERT_TRUE(control_->watch(*comm_, this));
  ASSERT_TRUE(ConnectedComms::eventually([&] {
    std::this_thread::yield();
    return !log.warnings().empty();
  }));
  EXPECT_NE(log.only_warning().find("no acknowledgement of its host"), std::string::npos) << log.only_warning();
  wire::MessageType last = wire::MessageType::kPing;
  while (last == wire::MessageType::kPing) last = next(ConnectedComms::kPatience);
  EXPECT_EQ(last, wire::MessageType::kFailed);
  const std::vector<std::string> lines = log.infos();
  EXPECT_TRUE(std::any_of(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find(" answers on the side channel again") != std::string::npos;
  }));
}

TEST_F(Keepalive, EachPingAnswered_DoesNotFail) {
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(next(ConnectedComms::kPatience), wire::MessageType::kPing) << i;
    ASSERT_NO_FATAL_FAILURE(say(wire::MessageType::kPong));
  }
  EXPECT_FALSE(failed());
}

TEST_F(Keepalive, PingReceived_IsAnswered) {
  ASSERT_NO_FATAL_FAILURE(say(wire::MessageType::kPing));
  wire::MessageType answer = wire::MessageType::kPing;
  for (int i = 0; i < 10 && answer == wire::MessageType::kPing; ++i) answer = next(ConnectedComms::kPatience);
  EXPECT_EQ(answer, wire::MessageType::kPong);
}

TEST_F(Keepalive, ForeignBytes_CountAsPeerGone) {
  const std::string http = "GET / HTTP/1.1\r\n\r\n";
  ASSERT_EQ(::send(peer_.socket().get(), http.data(), http.size(), MSG_NOSIGNAL), static_cast<ssize_t>(http.size()));
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    std::this_thread::yield();
    return (comm_->slow_path_flags() & static_cast<std::uint32_t>(CommEvent::kPeerDisconnected)) != 0;
  }));
}

}  // namespace
}  // namespace verbatim
