// That both ends know: what one end tells the other of its failure, and what silence says.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "base/clock.h"
#include "link.h"
#include "net/control.h"
#include "support/log_capture.h"

namespace verbatim {
namespace {

using Clock = std::chrono::steady_clock;

bool mentions(const std::vector<std::string>& lines, const std::string& text) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.find(text) != std::string::npos; });
}

TEST(Peer, AFailureIsToldToThePeerAtOnce) {
  Link link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  std::vector<std::uint8_t> source(100);
  std::vector<std::uint8_t> target(100);
  const auto send_memory = link.reg(link.send(), source);
  const auto recv_memory = link.reg(link.recv(), target);
  const RecvBuffer buffer{target.data(), 50, 0, recv_memory.get()};
  ASSERT_NE(link.posted([&] { return link.irecv({&buffer, 1}); }), nullptr);
  const LogCapture log;
  const auto end = Clock::now() + Link::kPatience;
  while (link.send().error() == nullptr && Clock::now() < end) {
    ASSERT_EQ(link.isend(source.data(), 51, 0, *send_memory), nullptr);
  }
  ASSERT_NE(link.send().error(), nullptr);
  const auto failed = Clock::now();
  while (link.recv().error() == nullptr && Clock::now() < end) link.recv().progress();
  ASSERT_NE(link.recv().error(), nullptr);
  std::printf("the peer knew after %.0f ms\n",
              std::chrono::duration<double, std::milli>(Clock::now() - failed).count());
  EXPECT_LT(Clock::now() - failed, std::chrono::seconds(10));
  EXPECT_EQ(link.recv().error()->kind, ErrorKind::kRemote);
  EXPECT_TRUE(mentions(log.warnings(), "reported: isend of 51 bytes"));
  EXPECT_EQ(log.warnings().size(), 2U);  // one at each end
}

// Nothing is outstanding: the next call that needs the peer says so.
TEST(Peer, AnIdleEndHearsOfThePeersFailureAtItsNextCall) {
  Link link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  std::vector<std::uint8_t> source(8);
  std::vector<std::uint8_t> target(8);
  const auto send_memory = link.reg(link.send(), source);
  const auto recv_memory = link.reg(link.recv(), target);
  const RecvBuffer buffer{target.data(), target.size(), 0, recv_memory.get()};
  ASSERT_NE(link.irecv({&buffer, 1}), nullptr);  // there is a CTS: nothing but the failure holds the sender back
  const LogCapture log;
  link.recv().abort();
  const auto end = Clock::now() + Link::kPatience;
  while (link.recv().error() == nullptr && Clock::now() < end) link.recv().progress();
  ASSERT_NE(link.recv().error(), nullptr);
  while ((link.send().attention() & Comm::kSignals) == 0 && Clock::now() < end) std::this_thread::yield();
  while (link.send().error() == nullptr && Clock::now() < end) {
    ASSERT_EQ(link.isend(source.data(), source.size(), 0, *send_memory), nullptr);
  }
  ASSERT_NE(link.send().error(), nullptr);
  EXPECT_EQ(link.send().error()->kind, ErrorKind::kRemote);
  EXPECT_TRUE(mentions(log.warnings(), " reported: "));
}

TEST(Peer, AnOwnerThatGivesUpIsToldFromOneThatCloses) {
  Link link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  std::vector<std::uint8_t> buffer(8);
  const auto send_memory = link.reg(link.send(), buffer);
  const auto recv_memory = link.reg(link.recv(), buffer);
  const RecvBuffer receive{buffer.data(), buffer.size(), 7, recv_memory.get()};
  ASSERT_NE(link.irecv({&receive, 1}), nullptr);
  const LogCapture log;
  link.context().close(link.recv());
  const auto end = Clock::now() + Link::kPatience;
  while (link.send().error() == nullptr && Clock::now() < end) {
    ASSERT_EQ(link.isend(buffer.data(), buffer.size(), 8, *send_memory), nullptr);
  }
  ASSERT_NE(link.send().error(), nullptr);
  EXPECT_EQ(link.send().error()->kind, ErrorKind::kRemote);
  EXPECT_NE(log.only_warning().find("has given up"), std::string::npos);
}

// One end of a connection whose other end is the test's: a socket, and what is said on it.
class Silence : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kKeepaliveNs = 400 * kNanosecondsPerMillisecond;

  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(link_.connect());
    Result<std::unique_ptr<ControlThread>> control = ControlThread::start({}, {.keepalive_ns = kKeepaliveNs});
    ASSERT_TRUE(control);
    control_ = std::move(*control);
    wire::Hello peer;
    peer.qps.resize(1);
    const std::span<const Port* const> span = link_.recv().endpoint().ports();
    const std::vector<const Port*> ports(span.begin(), span.end());
    const Config& config = link_.context().config();
    Result<Endpoint> endpoint = Endpoint::create(ports, RecvComm::endpoint_sizes(config, ports, peer), config);
    ASSERT_TRUE(endpoint);
    Result<std::unique_ptr<RecvComm>> comm = RecvComm::create(link_.context(), std::move(*endpoint), peer);
    ASSERT_TRUE(comm);
    comm_ = std::move(*comm);
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    comm_->keep_side_channel(UniqueFd(ends[0]));
    peer_ = UniqueFd(ends[1]);
    ASSERT_TRUE(control_->watch(*comm_));
  }
  void TearDown() override {
    if (control_ != nullptr) control_->forget(*comm_);
    control_.reset();
  }

  // The next message to the peer within the time; kReady when there is none.
  wire::MessageType next(std::chrono::milliseconds time) {
    std::array<std::uint8_t, wire::kHeaderBytes> header{};
    pollfd ready{peer_.get(), POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(time.count())) <= 0) return wire::MessageType::kReady;
    if (::recv(peer_.get(), header.data(), header.size(), MSG_WAITALL) != static_cast<ssize_t>(header.size())) {
      return wire::MessageType::kReady;
    }
    const Result<wire::Header> decoded = wire::decode_header(header);
    EXPECT_TRUE(decoded);
    return decoded ? decoded->type : wire::MessageType::kReady;
  }
  void say(const wire::Notice& notice) {
    const auto bytes = notice.bytes();
    ASSERT_EQ(::send(peer_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  bool failed() {
    comm_->progress();
    return comm_->error() != nullptr;
  }

  Link link_;
  UniqueFd peer_;
  std::unique_ptr<RecvComm> comm_;
  std::unique_ptr<ControlThread> control_;
};

TEST_F(Silence, OfAPeerIsAnErrorAtBothEnds) {
  const LogCapture log;
  const auto begin = Clock::now();
  while (!failed() && Clock::now() < begin + Link::kPatience) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ASSERT_NE(comm_->error(), nullptr);
  std::printf("after %.0f ms\n", std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  EXPECT_EQ(comm_->error()->kind, ErrorKind::kRemote);
  EXPECT_NE(log.only_warning().find("VERBATIM_KEEPALIVE_S"), std::string::npos);
  EXPECT_EQ(next(Link::kPatience), wire::MessageType::kPing);
  wire::MessageType last = wire::MessageType::kPing;
  while (last == wire::MessageType::kPing) last = next(Link::kPatience);
  EXPECT_EQ(last, wire::MessageType::kFailed);
}

TEST_F(Silence, IsNoneWhereEachPingIsAnswered) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(next(Link::kPatience), wire::MessageType::kPing) << i;
    ASSERT_NO_FATAL_FAILURE(say(wire::Notice::without_body(wire::MessageType::kPong)));
  }
  EXPECT_FALSE(failed());
}

TEST_F(Silence, OfOurOwnIsNone) {
  ASSERT_NO_FATAL_FAILURE(say(wire::Notice::without_body(wire::MessageType::kPing)));
  wire::MessageType answer = wire::MessageType::kPing;
  for (int i = 0; i < 10 && answer == wire::MessageType::kPing; ++i) answer = next(Link::kPatience);
  EXPECT_EQ(answer, wire::MessageType::kPong);
}

TEST_F(Silence, WhatIsNoMessageOfOursEndsThePeer) {
  const std::string http = "GET / HTTP/1.1\r\n\r\n";
  ASSERT_EQ(::send(peer_.get(), http.data(), http.size(), MSG_NOSIGNAL), static_cast<ssize_t>(http.size()));
  const auto end = Clock::now() + Link::kPatience;
  while ((comm_->attention() & static_cast<std::uint32_t>(CommSignal::kPeerGone)) == 0 && Clock::now() < end) {
    std::this_thread::yield();
  }
  EXPECT_NE(comm_->attention() & static_cast<std::uint32_t>(CommSignal::kPeerGone), 0U);
}

}  // namespace
}  // namespace verbatim
