// A channel with several connections: each message counts once, in order, while any connection works.
#include "rma/channel.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "base/socket.h"
#include "base/unique_fd.h"
#include "wire/rma.h"

namespace verbatim::rma {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes message(std::uint32_t sequence, std::size_t bytes = 0) {
  return wire::encode_rma_exchange({.call = wire::RmaCall::kRegister, .sequence = sequence, .body = Bytes(bytes)});
}

Bytes numbered(wire::RmaMessageNumber number, const Bytes& message) {
  Bytes bytes(sizeof number);
  std::memcpy(bytes.data(), &number, sizeof number);
  bytes.insert(bytes.end(), message.begin(), message.end());
  return bytes;
}

// Two connected TCP sockets: that of a channel, and the other one, which the test reads and writes.
struct Tcp {
  UniqueFd own;
  UniqueFd other;

  Tcp() {
    sockaddr_storage loopback{};
    auto& address = reinterpret_cast<sockaddr_in&>(loopback);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Result<UniqueFd> listener = tcp_listen(loopback);
    Result<UniqueFd> connected = tcp_connect(*local_address(*listener), {});
    while (!*tcp_connected(*connected)) continue;
    other = std::move(*connected);
    while (true) {
      Result<std::optional<UniqueFd>> accepted = tcp_accept(*listener);
      if (!accepted->has_value()) continue;
      own = std::move(**accepted);
      return;
    }
  }
  void write(const Bytes& bytes) const {
    ASSERT_EQ(::send(other.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  Bytes read(std::size_t most = 4096) const {
    pollfd ready{other.get(), POLLIN, 0};
    ::poll(&ready, 1, 1000);
    Bytes bytes(most);
    const ssize_t count = ::recv(other.get(), bytes.data(), most, 0);
    bytes.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
    return bytes;
  }
};

class RmaChannel : public ::testing::Test {
 protected:
  RmaChannel() { channel_.add(std::move(second_.own)); }

  // The sequence number of the next message, once it has come; nullopt: none comes, or the channel has ended.
  std::optional<std::uint32_t> next() {
    for (int i = 0; i < 200 && channel_.end() == Channel::End::kOpen; ++i) {
      channel_.receive();
      if (const std::optional<wire::RmaExchange> received = channel_.take()) return received->sequence;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::nullopt;
  }
  Channel::End end() {
    for (int i = 0; i < 200 && channel_.end() == Channel::End::kOpen; ++i) {
      channel_.receive();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return channel_.end();
  }

  Tcp first_;
  Tcp second_;
  Channel channel_{std::move(first_.own)};
};

TEST_F(RmaChannel, Message_GoesOverAllConnections) {
  channel_.send(message(5));
  channel_.send(message(6));
  EXPECT_TRUE(channel_.flush());
  Bytes both = message(5);
  const Bytes more = message(6);
  both.insert(both.end(), more.begin(), more.end());
  EXPECT_EQ(first_.read(), both);
  Bytes numbers = numbered(0, message(5));
  const Bytes second = numbered(1, message(6));
  numbers.insert(numbers.end(), second.begin(), second.end());
  EXPECT_EQ(second_.read(), numbers);
}

TEST_F(RmaChannel, SecondCopy_IsDropped) {
  first_.write(message(1));
  second_.write(numbered(0, message(1)));
  EXPECT_EQ(next(), 1U);
  EXPECT_EQ(next(), std::nullopt);
  second_.write(numbered(1, message(2)));
  EXPECT_EQ(next(), 2U);
  first_.write(message(2));
  EXPECT_EQ(next(), std::nullopt);
  first_.write(message(3));
  EXPECT_EQ(next(), 3U);
}

TEST_F(RmaChannel, MessageThatIsAhead_WaitsForTheEarlierOnes) {
  second_.write(numbered(1, message(2)));
  EXPECT_EQ(next(), std::nullopt);
  first_.write(message(1));
  EXPECT_EQ(next(), 1U);
  EXPECT_EQ(next(), 2U);
}

TEST_F(RmaChannel, ConnectionIsReset_TheOtherOneGoesOn) {
  const Bytes whole = message(1, 100);
  first_.write(Bytes(whole.begin(), whole.begin() + 50));
  close_with_reset(first_.other);
  second_.write(numbered(0, whole));
  EXPECT_EQ(next(), 1U);
  EXPECT_EQ(channel_.end(), Channel::End::kOpen);
  EXPECT_EQ(channel_.open_fd(), -1);
  channel_.send(message(7));
  EXPECT_TRUE(channel_.flush());
  EXPECT_EQ(second_.read(), numbered(0, message(7)));
  close_with_reset(second_.other);
  EXPECT_EQ(end(), Channel::End::kLost);
}

TEST_F(RmaChannel, SendFindsTheReset_TheOtherOneGoesOn) {
  close_with_reset(first_.other);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  channel_.send(message(7));
  EXPECT_EQ(channel_.end(), Channel::End::kOpen);
  EXPECT_TRUE(channel_.flush());
  EXPECT_EQ(second_.read(), numbered(0, message(7)));
  second_.write(numbered(0, message(8)));
  EXPECT_EQ(next(), 8U);
}

TEST_F(RmaChannel, MessageWasLostWithItsConnection_IsLost) {
  second_.write(numbered(1, message(2)));
  EXPECT_EQ(next(), std::nullopt);
  close_with_reset(first_.other);
  EXPECT_EQ(end(), Channel::End::kLost);
}

TEST_F(RmaChannel, EndOfFile_IsTheEndOfTheProcess) {
  second_.other.reset();
  EXPECT_EQ(end(), Channel::End::kLost);
}

TEST_F(RmaChannel, CloseOverOneConnection_IsClose) {
  const Bytes close = wire::encode_rma_close();
  second_.write(numbered(0, close));
  EXPECT_EQ(end(), Channel::End::kClosed);
}

TEST_F(RmaChannel, ConnectionThatTakesNothing_IsGivenUp) {
  std::size_t read = 0;
  const Bytes large = message(1, 1U << 19);
  for (int i = 0; i < 40; ++i) {
    channel_.send(large);
    while (!channel_.flush()) read += second_.read(1U << 20).size();
  }
  EXPECT_EQ(channel_.open_fd(), -1);
  EXPECT_EQ(channel_.end(), Channel::End::kOpen);
  while (read < 40 * numbered(0, large).size()) {
    const std::size_t more = second_.read(1U << 20).size();
    ASSERT_NE(more, 0U);
    read += more;
  }
}

}  // namespace
}  // namespace verbatim::rma
