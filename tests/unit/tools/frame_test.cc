//: in verbatim_perf_test

// Frames between ranks and coordinator: sending, reading in pieces, closed connections; packing of several texts.
#include "ranks/frame.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "ranks/failure.h"

namespace verbatim::ranks {
namespace {

class FrameTest : public testing::Test {
 protected:
  FrameTest() {
    int pair[2];
    EXPECT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair));
    writer_.reset(pair[0]);
    reading_end_.reset(pair[1]);
  }
  void write(const std::string& bytes) {
    ASSERT_EQ(static_cast<ssize_t>(bytes.size()), ::send(writer_.get(), bytes.data(), bytes.size(), 0));
  }

  UniqueFd writer_;
  UniqueFd reading_end_;
  FrameReader reader_;
};

TEST_F(FrameTest, SeveralFrames_ArriveWholeAndInOrder) {
  ASSERT_TRUE(send_frame(writer_.get(), FrameKind::kGather, "first"));
  ASSERT_TRUE(send_frame(writer_.get(), FrameKind::kFinished, ""));
  ASSERT_EQ(FrameReader::State::kOpen, reader_.read(reading_end_.get()));
  const auto first = reader_.next();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(FrameKind::kGather, first->kind);
  EXPECT_EQ("first", first->payload);
  const auto second = reader_.next();
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(FrameKind::kFinished, second->kind);
  EXPECT_FALSE(reader_.next().has_value());
}

TEST_F(FrameTest, FrameByteByByte_ArrivesWhole) {
  ASSERT_TRUE(send_frame(writer_.get(), FrameKind::kFail, "text"));
  std::string bytes(100, '\0');
  const ssize_t n = ::recv(reading_end_.get(), bytes.data(), bytes.size(), 0);
  ASSERT_GT(n, 4);
  for (ssize_t i = 0; i < n; ++i) {
    EXPECT_FALSE(reader_.next().has_value());
    write(bytes.substr(static_cast<std::size_t>(i), 1));
    ASSERT_EQ(FrameReader::State::kOpen, reader_.read(reading_end_.get()));
  }
  const auto frame = reader_.next();
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ("text", frame->payload);
}

TEST_F(FrameTest, BytesOfAnotherProtocol_CloseConnection) {
  write("GET / HTTP/1.1\r\n\r\n");
  reader_.read(reading_end_.get());
  EXPECT_FALSE(reader_.next().has_value());
  EXPECT_EQ(FrameReader::State::kClosed, reader_.read(reading_end_.get()));
}

TEST_F(FrameTest, PeerClosed_IsReportedAsClosed) {
  writer_.reset();
  EXPECT_EQ(FrameReader::State::kClosed, reader_.read(reading_end_.get()));
}

TEST(Pack, Unpack_RestoresParts) {
  const std::vector<std::string> parts{"", "one", std::string(3, '\0'), ""};
  EXPECT_EQ(parts, unpack(pack(parts)));
  EXPECT_TRUE(unpack("").empty());
  const std::string packed = pack({"whole"});
  for (std::size_t bytes = 1; bytes < packed.size(); ++bytes) {
    EXPECT_THROW(unpack(packed.substr(0, bytes)), Failure) << bytes;
  }
}

}  // namespace
}  // namespace verbatim::ranks
