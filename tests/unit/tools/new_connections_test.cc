//: in verbatim_perf_test

// Connections to a job from which no first frame has come: how many there can be, and what they can send.
#include "ranks/new_connections.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "ranks/meeting_point.h"

namespace verbatim::ranks {
namespace {

constexpr std::size_t kConnections = 5;
constexpr std::uint64_t kNeverNs = 1'000'000 * kNanosecondsPerSecond;

// Local sockets: a connection is in the queue of the listener, and its bytes at the other end, when the call returns.
const std::string kPlace = "unix:new-connections-test-" + std::to_string(::getpid());

UniqueFd connect_to_listener() {
  return connect_to(kPlace, 0);
}

bool is_open(const UniqueFd& socket) {
  char byte = 0;
  return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

class NewConnectionsTest : public testing::Test {
 protected:
  NewConnections connections_{listen_at(kPlace), {kConnections, kNeverNs}};
};

TEST_F(NewConnectionsTest, FirstFrame_IsReturnedWithWhatFollows) {
  const UniqueFd socket = connect_to_listener();
  EXPECT_TRUE(connections_.take().empty());
  ASSERT_TRUE(send_frame(socket.get(), FrameKind::kHello, "sixteen bytes .."));
  ASSERT_TRUE(send_frame(socket.get(), FrameKind::kGather, std::string(100'000, 'x')));
  auto arrived = connections_.take();
  ASSERT_EQ(1U, arrived.size());
  EXPECT_EQ("sixteen bytes ..", arrived.front().first.payload);
  std::optional<Frame> second;
  while (!(second = arrived.front().reader.next())) {
    ASSERT_EQ(FrameReader::State::kOpen, arrived.front().reader.read(arrived.front().socket.get()));
  }
  EXPECT_EQ(100'000U, second->payload.size());
  EXPECT_TRUE(connections_.take().empty());
}

TEST_F(NewConnectionsTest, LongerFirstFrame_ClosesConnection) {
  const UniqueFd socket = connect_to_listener();
  ASSERT_TRUE(send_frame(socket.get(), FrameKind::kHello, std::string(kMaxFirstFrameBytes + 1, 'x')));
  while (is_open(socket)) ASSERT_TRUE(connections_.take().empty());
}

TEST_F(NewConnectionsTest, TooManyWithoutFrame_OldestAreClosed) {
  std::vector<UniqueFd> sockets;
  for (std::size_t i = 0; i < kConnections; ++i) sockets.push_back(connect_to_listener());
  EXPECT_TRUE(connections_.take().empty());
  for (const UniqueFd& socket : sockets) EXPECT_TRUE(is_open(socket));
  for (std::size_t i = 0; i < 3; ++i) sockets.push_back(connect_to_listener());
  EXPECT_TRUE(connections_.take().empty());
  for (std::size_t i = 0; i < sockets.size(); ++i) EXPECT_EQ(i >= 3, is_open(sockets[i])) << i;
  // The latest is not held up by the others.
  ASSERT_TRUE(send_frame(sockets.back().get(), FrameKind::kHello, "hello"));
  EXPECT_EQ(1U, connections_.take().size());
}

TEST(NewConnectionsTime, NoFrameInTime_ClosesConnection) {
  NewConnections connections(listen_at(kPlace), {kConnections, 0});
  const UniqueFd socket = connect_to_listener();
  EXPECT_TRUE(connections.take().empty());
  EXPECT_FALSE(is_open(socket));
}

}  // namespace
}  // namespace verbatim::ranks
