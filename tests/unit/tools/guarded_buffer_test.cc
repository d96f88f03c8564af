//: in tools_memory_test

// Guard bytes around a buffer: alignment, and detection of any changed guard byte.
#include "memory/guarded_buffer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

namespace verbatim::memory {
namespace {

std::byte& at(const GuardedBuffer& buffer, std::ptrdiff_t offset) {
  return *(buffer.data() + offset);
}

TEST(GuardedBuffer, Misalignment_IsAddedToPageAlignment) {
  const auto memory = make_host_memory();
  EXPECT_EQ(0U, reinterpret_cast<std::uintptr_t>(GuardedBuffer(*memory, 100).data()) % 4096);
  EXPECT_EQ(13U, reinterpret_cast<std::uintptr_t>(GuardedBuffer(*memory, 100, 13).data()) % 4096);
}

TEST(GuardedBuffer, DataWritten_GuardsAreIntact) {
  const auto memory = make_host_memory();
  for (const std::size_t bytes : {0UL, 1UL, 4096UL, 100'001UL}) {
    GuardedBuffer buffer(*memory, bytes, 5);
    std::memset(buffer.data(), 0xff, buffer.size());
    EXPECT_FALSE(buffer.damage().has_value());
  }
}

TEST(GuardedBuffer, FlippedBitInAnyGuardByte_IsFound) {
  const auto memory = make_host_memory();
  GuardedBuffer buffer(*memory, 1'000, 3);
  const auto guard = static_cast<std::ptrdiff_t>(GuardedBuffer::kGuardBytes);
  for (std::ptrdiff_t i = 0; i < guard; ++i) {
    for (const std::ptrdiff_t offset : {-1 - i, 1'000 + i}) {
      at(buffer, offset) ^= std::byte{0x10};
      const auto damage = buffer.damage();
      ASSERT_TRUE(damage.has_value());
      ASSERT_EQ(offset, damage->offset);
      ASSERT_EQ(1U, damage->bytes);
      at(buffer, offset) ^= std::byte{0x10};
    }
  }
  EXPECT_FALSE(buffer.damage().has_value());
}

TEST(GuardedBuffer, Resized_GuardFollowsEndOfData) {
  const auto memory = make_host_memory();
  GuardedBuffer buffer(*memory, 100'000);
  for (const std::size_t bytes : {0UL, 1UL, 50'000UL, 100'000UL}) {
    buffer.resize(bytes);
    std::memset(buffer.data(), 0xff, bytes);
    EXPECT_FALSE(buffer.damage().has_value());
    at(buffer, static_cast<std::ptrdiff_t>(bytes)) ^= std::byte{1};
    ASSERT_TRUE(buffer.damage().has_value());
    EXPECT_EQ(static_cast<std::int64_t>(bytes), buffer.damage()->offset);
  }
  EXPECT_EQ(100'000U, buffer.capacity());
}

}  // namespace
}  // namespace verbatim::memory
