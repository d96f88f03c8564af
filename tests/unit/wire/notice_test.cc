#include "wire/notice.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace verbatim::wire {
namespace {

Header header_of(const Notice& notice) {
  const Result<Header> header =
      decode_header(std::span<const std::uint8_t, kHeaderBytes>(notice.bytes().data(), kHeaderBytes));
  EXPECT_TRUE(header);
  return header ? *header : Header{};
}

std::vector<std::uint8_t> body_of(const Notice& notice) {
  EXPECT_EQ(header_of(notice).body_bytes, notice.bytes().size() - kHeaderBytes);
  return {notice.bytes().begin() + kHeaderBytes, notice.bytes().end()};
}

TEST(Notice, WithoutBody_IsHeaderOnly) {
  for (const MessageType type : {MessageType::kClose, MessageType::kPing, MessageType::kPong}) {
    const Notice notice = Notice::without_body(type);
    EXPECT_EQ(header_of(notice).type, type);
    EXPECT_EQ(header_of(notice).body_bytes, 0U);
    EXPECT_EQ(notice.bytes().size(), kHeaderBytes);
  }
}

TEST(Notice, Failure_RoundTripsAndLongTextIsTruncated) {
  std::vector<std::uint8_t> body = body_of(Notice::failed(ErrorKind::kSystem, "ibv_post_send failed"));
  EXPECT_EQ(decode_failure(body)->kind, ErrorKind::kSystem);
  EXPECT_EQ(decode_failure(body)->text, "ibv_post_send failed");

  const Notice longest = Notice::failed(ErrorKind::kRemote, std::string(10'000, 'x'));
  EXPECT_EQ(header_of(longest).type, MessageType::kFailed);
  EXPECT_EQ(longest.bytes().size(), kMaxNoticeBytes);
  body = body_of(longest);
  EXPECT_EQ(decode_failure(body)->text, std::string(kMaxFailureText, 'x'));
}

TEST(Notice, LongFailure_EndsWithStatementOrWord) {
  const auto sent = [](const std::string& text) {
    std::vector<std::uint8_t> body = body_of(Notice::failed(ErrorKind::kRemote, text));
    return std::string(decode_failure(body)->text);
  };
  const std::string what(kMaxFailureText - 10, 'x');
  EXPECT_EQ(sent(what + ": because of this and that"), what);
  EXPECT_EQ(sent(what + " because of this and that"), what + " because");
  EXPECT_EQ(sent("a: " + what + " because of"), "a: " + what);
  const std::string exact(kMaxFailureText, 'x');
  EXPECT_EQ(sent(exact), exact);
  EXPECT_EQ(sent(exact + ": more"), exact);
}

TEST(Notice, FailureWithControlCharacters_IsMadePrintable) {
  std::vector<std::uint8_t> body = body_of(Notice::failed(ErrorKind::kRemote, "a\n\x1b[2J\xff%s"));
  EXPECT_EQ(decode_failure(body)->text, "a??[2J?%s");
}

TEST(Notice, MalformedFailure_IsRejected) {
  std::vector<std::uint8_t> body = body_of(Notice::failed(ErrorKind::kRemote, ""));
  EXPECT_TRUE(decode_failure(body));
  body[0] = 7;
  EXPECT_FALSE(decode_failure(body));
  body.resize(3);
  EXPECT_FALSE(decode_failure(body));
}

TEST(Notice, StatusQueryAndReply_RoundTrip) {
  const std::vector<std::uint8_t> question = body_of(Notice::status_query(17));
  EXPECT_EQ(decode<std::uint32_t>(question), 17U);
  EXPECT_FALSE(decode<std::uint32_t>(std::span(question).first(3)));

  const ConnectionStatus view{.id = 17,
                              .sends = 1,
                              .qp_state = 3,
                              .flags = ConnectionStatus::kSendRefused | ConnectionStatus::kTested,
                              .members = 0xffffffff,
                              .outstanding = 5,
                              .flushes = 6,
                              .no_progress_ms = 31'000,
                              .bytes = std::uint64_t{1} << 40};
  std::vector<std::uint8_t> reply = body_of(Notice::status_reply(view));
  const std::optional<ConnectionStatus> decoded = decode_status_reply(reply);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->id, 17U);
  EXPECT_EQ(decoded->sends, 1);
  EXPECT_EQ(decoded->qp_state, 3);
  EXPECT_EQ(decoded->flags, ConnectionStatus::kSendRefused | ConnectionStatus::kTested);
  EXPECT_EQ(decoded->members, 0xffffffffU);
  EXPECT_EQ(decoded->outstanding, 5U);
  EXPECT_EQ(decoded->flushes, 6U);
  EXPECT_EQ(decoded->no_progress_ms, 31'000U);
  EXPECT_EQ(decoded->bytes, std::uint64_t{1} << 40);
  for (std::size_t bytes = 0; bytes < reply.size(); ++bytes) {
    EXPECT_FALSE(decode_status_reply(std::span(reply).first(bytes))) << bytes;
  }
  reply[4] = 2;  // `sends` must be 0 or 1
  EXPECT_FALSE(decode_status_reply(reply));
}

TEST(Notice, Ack_HasTheNumbersOfMessages) {
  const std::vector<std::uint8_t> body = body_of(Notice::ack({std::uint64_t{1} << 40, 7}));
  const std::optional<Ack> decoded = decode<Ack>(body);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->received, std::uint64_t{1} << 40);
  EXPECT_EQ(decoded->number, 7U);
  for (std::size_t bytes = 0; bytes < body.size(); ++bytes) {
    EXPECT_FALSE(decode<Ack>(std::span(body).first(bytes))) << bytes;
  }
}

TEST(Notice, Resume_NamesTheEndOfTheConnection) {
  const ConnectionEnd end{{{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 0xfedcba9876543210}, 1};
  EXPECT_EQ(end.other().other(), end);
  EXPECT_FALSE(decode_resume(body_of(Notice::resume({{end.connection, 2}, 1}, {}))));
  const Resume resume{end, 7};
  const Notice notice = Notice::resume(resume, Key{1});
  EXPECT_TRUE(has_mac(notice.bytes(), Key{1}));
  EXPECT_FALSE(has_mac(notice.bytes(), Key{2}));
  const std::vector<std::uint8_t> body = body_of(notice);
  EXPECT_EQ(body.size(), sizeof resume + kMacBytes);
  EXPECT_EQ(decode_resume(body), resume);
  for (std::size_t bytes = 0; bytes < sizeof resume; ++bytes) {
    EXPECT_FALSE(decode_resume(std::span(body).first(bytes))) << bytes;
  }
}

}  // namespace
}  // namespace verbatim::wire
