// The TCP connection of the side channel is reset while both ends live: data goes on, the peer's NIC is asked, and the
// side channel is made again.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/socket.h"
#include "one_end.h"
#include "side_channels.h"
#include "support/refusal.h"
#include "support/state_reader.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

// How many side channels are back so far.
std::size_t back(const LogCapture& log) {
  const std::vector<std::string> lines = log.infos();
  return static_cast<std::size_t>(std::count_if(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find(" is back after ") != std::string::npos;
  }));
}

class SideChannelLoss : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NO_FATAL_FAILURE(link_.connect()); }

  void exchange(Buffers<>& buffers) {
    Request* const recv = link_.posted([&] { return buffers.irecv(8); });
    ASSERT_NE(recv, nullptr);
    Request* const send = link_.posted([&] { return buffers.isend(8); });
    ASSERT_NE(send, nullptr);
    ASSERT_TRUE(link_.wait(send));
    ASSERT_TRUE(link_.wait(recv));
    link_.is_completed(send);
    link_.is_completed(recv);
  }
  // Until listen_again() both ends find that the peer's listener refuses.
  void refuse() {
    listening_ = listening_socket(link_);
    ASSERT_GE(listening_, 0);
    test::refuse_connections(listening_);
  }
  void listen_again() const { test::accept_connections(listening_); }
  static bool has(const Comm& comm, CommEvent event) {
    return (comm.slow_path_flags() & static_cast<std::uint32_t>(event)) != 0;
  }
  ConnectedComms link_;
  int listening_ = -1;
};

TEST_F(SideChannelLoss, ResetWhileDataFlows_DataGoesOnAndChannelIsBack) {
  Buffers<> buffers(link_, 8);
  ASSERT_NO_FATAL_FAILURE(exchange(buffers));
  const LogCapture log;
  for (int i = 0; i < 3; ++i) {
    const std::size_t before = back(log);
    ASSERT_NO_FATAL_FAILURE(reset(link_.send()));
    ASSERT_TRUE(ConnectedComms::eventually([&] {
      exchange(buffers);
      return back(log) >= before + 2;  // both ends
    })) << i;
  }
  ASSERT_NO_FATAL_FAILURE(exchange(buffers));
  EXPECT_FALSE(link_.failed());
  // The new side channel carries the notices.
  link_.recv().abort();
  ASSERT_TRUE(link_.fails(link_.recv()));
  ASSERT_TRUE(link_.fails(link_.send(), [&] {
    std::this_thread::yield();
    buffers.isend(8);
    link_.send().progress();
  }));
  EXPECT_NE(link_.send().failure()->what.find(" reported: "), std::string::npos) << link_.send().failure()->what;
}

// A sender that waits for a receive, and a receiver that waits for data.
TEST_F(SideChannelLoss, NothingMoves_PeersNicIsAskedAndNothingFails) {
  Buffers<> buffers(link_, 8);
  Request* const recv = link_.posted([&] { return buffers.irecv(8, 1); });
  ASSERT_NE(recv, nullptr);
  const LogCapture log;
  // Each reset of one end reaches the other.
  for (Comm* comm : {static_cast<Comm*>(&link_.send()), static_cast<Comm*>(&link_.recv())}) {
    const std::uint32_t sender_before = link_.send().probes_answered();
    const std::uint32_t receiver_before = link_.recv().probes_answered();
    const std::size_t before = back(log);
    ASSERT_NO_FATAL_FAILURE(refuse());
    ASSERT_NO_FATAL_FAILURE(reset(*comm));
    ASSERT_TRUE(ConnectedComms::eventually([&] {
      EXPECT_EQ(buffers.isend(8, 2), nullptr);  // another tag
      int done = 0;
      EXPECT_EQ(RecvComm::test(*recv, &done, nullptr), ErrorKind::kNone);
      return link_.send().probes_answered() != sender_before && link_.recv().probes_answered() != receiver_before;
    }));
    ASSERT_NO_FATAL_FAILURE(listen_again());
    ASSERT_TRUE(ConnectedComms::eventually([&] {
      std::this_thread::yield();
      return back(log) >= before + 2;
    }));
  }
  EXPECT_FALSE(link_.failed());
  EXPECT_GE(log.warnings().size(), 2U) << "one for each reset, or for each end";
  EXPECT_LE(log.warnings().size(), 4U);
  // All send work requests are free again.
  EXPECT_EQ(link_.send().status().outstanding, 0U);
  Request* const send = link_.posted([&] { return buffers.isend(8, 1); });
  ASSERT_NE(send, nullptr);
  EXPECT_TRUE(link_.wait(send));
  EXPECT_TRUE(link_.wait(recv));
}

// The NIC has answered, and the answer lies in the CQ: the application has not polled.
TEST_F(SideChannelLoss, ListenerRefusesAndApplicationDoesNotPoll_NothingFails) {
  Buffers<> buffers(link_, 8);
  ASSERT_NO_FATAL_FAILURE(exchange(buffers));
  const LogCapture log;
  ASSERT_NO_FATAL_FAILURE(refuse());
  ASSERT_NO_FATAL_FAILURE(reset(link_.send()));
  ASSERT_TRUE(ConnectedComms::eventually([&] {
    std::this_thread::yield();
    return has(link_.send(), CommEvent::kProbePeer);
  }));
  ASSERT_EQ(buffers.isend(8), nullptr);  // posts the probe
  ASSERT_NE(link_.send().slow_path_flags() & Comm::kProbing, 0U);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_FALSE(has(link_.send(), CommEvent::kPeerDisconnected));
  ASSERT_NO_FATAL_FAILURE(listen_again());
  ASSERT_TRUE(ConnectedComms::eventually([&] {
    exchange(buffers);
    return back(log) >= 2;  // both ends
  }));
  EXPECT_FALSE(link_.failed());
}

TEST_F(SideChannelLoss, PeerClosesAfterReset_IsNoticed) {
  const LogCapture log;
  Buffers<> buffers(link_, 8);
  ASSERT_NO_FATAL_FAILURE(reset(link_.send()));
  link_.context().close(link_.recv());
  // It is closing until the side channel is back and its close message is sent.
  ASSERT_TRUE(link_.fails(link_.send(), [&] {
    std::this_thread::yield();
    buffers.isend(8);
  }));
  EXPECT_NE(link_.send().failure()->what.find("closed a connection"), std::string::npos);
}

TEST_F(SideChannelLoss, UnknownConnection_IsClosedWithoutReply) {
  const Result<sockaddr_storage> listener = remote_address(link_.send().channel().socket());
  ASSERT_TRUE(listener);
  const wire::Hello& remote = link_.send().endpoint().remote();
  const LogCapture log;
  for (const bool whole : {true, false}) {
    const wire::Notice notice = wire::Notice::resume({{{remote.listen, remote.attempt ^ 1}, 0}, 1}, {});
    const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&*listener), sizeof(sockaddr_in)), 0);
    std::vector<std::uint8_t> bytes(notice.bytes().begin(), notice.bytes().end());
    if (!whole) {  // a body that is too short
      wire::put_header(std::span(bytes).first<wire::kHeaderBytes>(), wire::MessageType::kResume, 4);
      bytes.resize(wire::kHeaderBytes + 4);
    }
    ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    std::uint8_t answer = 0;
    EXPECT_EQ(::recv(socket.get(), &answer, 1, 0), 0) << whole;
  }
  Buffers<> buffers(link_, 8);
  ASSERT_NO_FATAL_FAILURE(exchange(buffers));
  EXPECT_FALSE(link_.failed());
  EXPECT_EQ(back(log), 0U);
}

// The connecting side repeats its attempts until the peer answers, and ends those that fail with a reset.
TEST_F(OneEnd, Sender_MakesTheChannelAgain) {
  ASSERT_NO_FATAL_FAILURE(watch_sender());
  peer_.close_with_reset();
  for (const char* answer : {"", "SSH-2.0-OpenSSH_9.6\r\n"}) {
    test::PeerSocket attempt = asked();
    if (*answer == '\0') continue;  // closes it
    ASSERT_GT(::send(attempt.socket().get(), answer, std::strlen(answer), MSG_NOSIGNAL), 0);
    EXPECT_EQ(next(attempt), std::nullopt);
    EXPECT_EQ(error_, ECONNRESET);
  }
  EXPECT_TRUE(has(CommEvent::kProbePeer));
  EXPECT_NE(read_state(state_).find("\"state\":\"side channel lost\""), std::string::npos);
  test::PeerSocket attempt = asked();
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::ack({0, 0})));
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::MessageType::kPing));
  EXPECT_EQ(next(attempt), wire::MessageType::kPong);
  EXPECT_FALSE(has(CommEvent::kProbePeer));
  EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::without_body(wire::MessageType::kClose)));
  EXPECT_TRUE(eventually_has(CommEvent::kPeerClosed));  // the line is written before
  EXPECT_NE(log_.only_warning().find("ended with Connection reset by peer"), std::string::npos) << log_.only_warning();
}

// Something between the hosts has changed it.
TEST_F(OneEnd, MessageHasAWrongMac_ChannelIsMadeAgain) {
  ASSERT_NO_FATAL_FAILURE(watch_sender());
  std::vector<std::uint8_t> bytes = peer_.next_bytes(wire::Notice::failed(ErrorKind::kRemote, "why").bytes());
  bytes[wire::kHeaderBytes + 5] ^= 1;
  ASSERT_GT(::send(peer_.socket().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
  EXPECT_EQ(next(peer_), std::nullopt);
  EXPECT_EQ(error_, ECONNRESET);
  test::PeerSocket attempt = asked();
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::ack({0, 0})));
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::MessageType::kPing));
  EXPECT_EQ(next(attempt), wire::MessageType::kPong);
  EXPECT_FALSE(has(CommEvent::kPeerAborted) || has(CommEvent::kPeerDisconnected));
  EXPECT_EQ(comm_->error(), nullptr);
}

// An end of file means that the process has ended.
TEST_F(OneEnd, EndOfFile_IsThePeersEnd) {
  ASSERT_NO_FATAL_FAILURE(watch_sender());
  peer_.reset();
  EXPECT_TRUE(eventually_has(CommEvent::kPeerDisconnected));
  EXPECT_FALSE(has(CommEvent::kProbePeer));
}

// The accepting side takes the new side channel even if it has not noticed the end of the old one; notices that could
// not be sent before are sent then.
TEST_F(OneEnd, Receiver_AcceptsTheNewChannel) {
  const Result<sockaddr_storage> address = listener_->add(wire::Secret{1});
  ASSERT_TRUE(address);
  ASSERT_NO_FATAL_FAILURE(watch_receiver());
  listener_->remove(wire::listen_id({1}));  // the connection keeps the socket open
  for (const bool lost : {false, true, false}) {
    if (lost) {
      peer_.close_with_reset();
      ASSERT_TRUE(eventually_has(CommEvent::kProbePeer));
    }
    test::PeerSocket made = resume(*address);
    ASSERT_NO_FATAL_FAILURE(say(made, wire::Notice::ack({0, 0})));
    ASSERT_EQ(first(made), wire::MessageType::kAck);
    ASSERT_NO_FATAL_FAILURE(say(made, wire::MessageType::kPing));
    ASSERT_EQ(next(made), wire::MessageType::kPong);
    peer_ = std::move(made);
    EXPECT_FALSE(has(CommEvent::kProbePeer));
  }
  EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
  EXPECT_EQ(log_.warnings().size(), 1U);
  monitor_->unwatch(*comm_);  // sends the notice of the abort
  watched_ = false;
  EXPECT_EQ(next(peer_), wire::MessageType::kFailed);
  Result<UniqueFd> late = tcp_connect(*address, {});
  bool refused = !late;
  EXPECT_TRUE(refused || ConnectedComms::eventually([&] {
                const Result<bool> connected = tcp_connected(*late);
                refused = !connected;
                return refused || *connected;
              }));
  EXPECT_TRUE(refused) << "the socket is closed with the last connection";
}

// The connecting side has given up an attempt, with a reset, before or after the listener reads it.
TEST_F(OneEnd, Receiver_AttemptIsGivenUp_IsNoEndOfThePeer) {
  const Result<sockaddr_storage> address = listener_->add(wire::Secret{1});
  ASSERT_TRUE(address);
  ASSERT_NO_FATAL_FAILURE(watch_receiver());
  test::PeerSocket made = resume(*address);
  made.close_with_reset();
  EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
  made = resume(*address);
  EXPECT_EQ(first(made), wire::MessageType::kAck);
  EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
  listener_->remove(wire::listen_id({1}));
}

// Its failure notice or its close message was not sent: the peer gets it when it makes the side channel again.
TEST_F(OneEnd, Receiver_EndedWhileLost_PeerLearnsItLater) {
  const Result<sockaddr_storage> address = listener_->add(wire::Secret{1});
  ASSERT_TRUE(address);
  for (const bool aborted : {true, false}) {
    ASSERT_NO_FATAL_FAILURE(watch_receiver());
    peer_.close_with_reset();
    ASSERT_TRUE(eventually_has(CommEvent::kProbePeer));
    if (aborted) {
      monitor_->unwatch(*comm_);
    } else {
      monitor_->close_gracefully(std::move(comm_), kNanosecondsPerMillisecond);
      monitor_->drain(this, false);
    }
    watched_ = false;
    for (int i = 0; i < 2; ++i) {  // the answer may get lost too
      test::PeerSocket late = resume(*address);
      ASSERT_TRUE(!!late);
      std::uint8_t byte = 0;
      EXPECT_TRUE(ConnectedComms::eventually([&] {
        EXPECT_TRUE(listener_->take_resumed([](int) {}).empty());
        return ::recv(late.socket().get(), &byte, 1, MSG_PEEK) == 1;
      }));
      EXPECT_EQ(next(late), aborted ? wire::MessageType::kFailed : wire::MessageType::kClose);
    }
  }
  listener_->remove(wire::listen_id({1}));
}

TEST_F(OneEnd, Sender_PeerHasEndedMeanwhile_HasCommEvent) {
  for (const bool aborted : {true, false}) {
    ASSERT_NO_FATAL_FAILURE(watch_sender());
    peer_.close_with_reset();
    test::PeerSocket attempt = asked();
    ASSERT_NO_FATAL_FAILURE(say(attempt, aborted ? wire::Notice::failed(ErrorKind::kNone, "")
                                                 : wire::Notice::without_body(wire::MessageType::kClose)));
    EXPECT_TRUE(eventually_has(aborted ? CommEvent::kPeerAborted : CommEvent::kPeerClosed));
    monitor_->unwatch(*comm_);
    watched_ = false;
  }
}

// A peer that asks again has given up its earlier attempt: it holds one descriptor of this process.
TEST_F(OneEnd, ResumedTwice_LastSocketIsKept) {
  const Result<sockaddr_storage> address = listener_->add(wire::Secret{1});
  ASSERT_TRUE(address);
  listener_->add_connection({}, {}, 7);
  test::PeerSocket first = resume(*address);
  test::PeerSocket second = resume(*address);
  ASSERT_TRUE(first && second);
  std::uint8_t byte = 0;
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    EXPECT_TRUE(listener_->poll(wire::listen_id({1})));
    return ::recv(first.socket().get(), &byte, 1, 0) == 0;
  }));
  const std::vector<Listener::Resumed> resumed = listener_->take_resumed([](int) {});
  ASSERT_EQ(resumed.size(), 1U);
  EXPECT_EQ(resumed[0].key, 7);
  listener_->remove_connection({}, {}, std::nullopt);
  listener_->remove(wire::listen_id({1}));
}

// Of a connection that has been removed and whose key another one has got since.
TEST_F(OneEnd, ResumedAgainAndAgain_EachIsTakenWhenItComes) {
  const Result<sockaddr_storage> address = listener_->add(wire::Secret{1});
  ASSERT_TRUE(address);
  ASSERT_NO_FATAL_FAILURE(watch_receiver());
  wire::ConnectionEnd other;
  other.connection.attempt = 4711;
  listener_->add_connection(other, {}, comm_->channel().key());
  test::PeerSocket made;
  int closed = 0;
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    std::this_thread::yield();
    if (!made) made = resume(*address, other);
    std::uint8_t byte = 0;
    if (::recv(made.socket().get(), &byte, 1, 0) != 0) return false;
    made.reset();
    return ++closed == 200;
  })) << closed;
  ASSERT_NO_FATAL_FAILURE(say(peer_, wire::MessageType::kPing));
  EXPECT_EQ(next(peer_), wire::MessageType::kPong) << "the side channel has stayed the same";
  listener_->remove_connection(other, {}, std::nullopt);
  listener_->remove(wire::listen_id({1}));
}

TEST_F(OneEnd, ClosedWhileLost_EndsAtDeadline) {
  ASSERT_NO_FATAL_FAILURE(watch_sender());
  peer_.close_with_reset();
  ASSERT_TRUE(eventually_has(CommEvent::kProbePeer));
  listening_.reset();
  const std::uint64_t begin = monotonic_ns();
  monitor_->close_gracefully(std::move(comm_), 500 * kNanosecondsPerMillisecond);
  monitor_->drain(this, false);
  EXPECT_GE(monotonic_ns() - begin, 500 * kNanosecondsPerMillisecond) << "that the peer refuses does not end it";
}

TEST_F(OneEnd, ClosedWhileLost_CloseIsSentWhenItIsBack) {
  ASSERT_NO_FATAL_FAILURE(watch_sender());
  peer_.close_with_reset();
  ASSERT_TRUE(eventually_has(CommEvent::kProbePeer));
  monitor_->close_gracefully(std::move(comm_), 600 * kNanosecondsPerSecond);
  test::PeerSocket attempt = asked();
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::ack({0, 0})));
  EXPECT_EQ(next(attempt), wire::MessageType::kClose);
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::without_body(wire::MessageType::kClose)));
  monitor_->drain(this, false);
}

TEST_F(OneEnd, FailureWhileLost_IsReportedWhenItIsBack) {
  ASSERT_NO_FATAL_FAILURE(watch_sender());
  peer_.close_with_reset();
  ASSERT_TRUE(eventually_has(CommEvent::kProbePeer));
  comm_->set_device_event(IBV_EVENT_QP_FATAL, *comm_->endpoint().ports()[0]->device);
  auto& sender = static_cast<SendComm&>(*comm_);
  ASSERT_TRUE(ConnectedComms::fails(sender));
  test::PeerSocket attempt = asked();
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::ack({0, 0})));
  EXPECT_EQ(next(attempt), wire::MessageType::kFailed);
}

// It may have been lost with the TCP connection.
TEST_F(OneEnd, FailureIsNotAcknowledged_IsReportedAgain) {
  ASSERT_NO_FATAL_FAILURE(watch_sender());
  comm_->set_device_event(IBV_EVENT_QP_FATAL, *comm_->endpoint().ports()[0]->device);
  ASSERT_TRUE(ConnectedComms::fails(static_cast<SendComm&>(*comm_)));
  ASSERT_EQ(next(peer_), wire::MessageType::kFailed);
  peer_.close_with_reset();
  test::PeerSocket attempt = asked();
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::ack({0, 0})));
  EXPECT_EQ(next(attempt), wire::MessageType::kFailed);
  EXPECT_FALSE(has(CommEvent::kPeerDisconnected));
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::Notice::ack({1, 0})));
  ASSERT_NO_FATAL_FAILURE(say(attempt, wire::MessageType::kPing));
  while (next(attempt) == wire::MessageType::kPing) continue;
  attempt.close_with_reset();
  EXPECT_TRUE(eventually_has(CommEvent::kPeerDisconnected)) << "the peer has it";
}

}  // namespace
}  // namespace verbatim
