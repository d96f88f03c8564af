#include "wire/codec.h"

#include <gtest/gtest.h>

namespace verbatim::wire {
namespace {

TEST(Codec, Fields_RoundTripInOrder) {
  Writer writer;
  writer.put(std::uint8_t{7});
  writer.put(std::uint64_t{0x0123456789abcdef});
  writer.put(std::string("mlx5_0"));
  writer.put(std::uint16_t{513});
  const std::vector<std::uint8_t> bytes = std::move(writer).take();
  ASSERT_EQ(bytes.size(), 1U + 8U + 1U + 6U + 2U);
  EXPECT_EQ(bytes[1], 0xef);  // little-endian

  Reader reader(bytes);
  EXPECT_EQ(reader.get<std::uint8_t>(), 7);
  EXPECT_EQ(reader.get<std::uint64_t>(), 0x0123456789abcdefU);
  EXPECT_EQ(reader.get<std::string>(), "mlx5_0");
  EXPECT_EQ(reader.get<std::uint16_t>(), 513);
  EXPECT_TRUE(reader.complete());
}

TEST(Codec, ReadBeyondEnd_StaysIncomplete) {
  const std::vector<std::uint8_t> bytes = {1, 2, 3};
  Reader reader(bytes);
  EXPECT_EQ(reader.get<std::uint32_t>(), 0U);
  EXPECT_EQ(reader.get<std::uint8_t>(), 0);  // although bytes remain: after a failed read all reads return 0
  EXPECT_FALSE(reader.complete());
}

TEST(Codec, TextLongerThanMessage_IsRejected) {
  const std::vector<std::uint8_t> bytes = {200, 'a', 'b'};
  Reader reader(bytes);
  EXPECT_EQ(reader.get<std::string>(), "");
  EXPECT_FALSE(reader.complete());
}

TEST(Codec, LongText_IsTruncatedAt255Bytes) {
  Writer writer;
  writer.put(std::string(300, 'x'));
  EXPECT_EQ(std::move(writer).take().size(), 256U);
}

}  // namespace
}  // namespace verbatim::wire
