// The CRC-32 of a notification.
#include "workload/kv/crc32.h"

#include <gtest/gtest.h>

#include <string>

namespace verbatim::kv {
namespace {

TEST(Crc32, KnownText_HasKnownValue) {
  Crc32 crc;
  crc.add("123456789", 9);
  EXPECT_EQ(0xcbf43926U, crc.value());
}

TEST(Crc32, AnySplit_GivesSameValue) {
  std::string text(1000, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7);
  Crc32 whole;
  whole.add(text.data(), text.size());
  for (std::size_t split = 0; split < 40; ++split) {
    Crc32 pieces;
    pieces.add(text.data(), split);
    pieces.add(text.data() + split, text.size() - split);
    EXPECT_EQ(whole.value(), pieces.value());
  }
  text[500] = static_cast<char>(text[500] ^ 1);
  Crc32 other;
  other.add(text.data(), text.size());
  EXPECT_NE(whole.value(), other.value());
}

}  // namespace
}  // namespace verbatim::kv
