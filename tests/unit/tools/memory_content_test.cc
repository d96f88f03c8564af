//: in tools_memory_test

// Content in memory that the CPU cannot access is the same as in host memory, across the blocks in which it is copied.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "memory/content.h"
#include "memory/guarded_buffer.h"

namespace verbatim::memory {
namespace {

// Host memory that only the copies may access: a pointer to it is beyond the memory itself by a fixed distance.
class FarMemory final : public Memory {
 public:
  bool is_host() const override { return false; }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    std::memcpy(near(to), near(from), bytes);
  }
  void upload(std::byte* to, const void* from, std::size_t bytes) override { std::memcpy(near(to), from, bytes); }
  void download(void* to, const std::byte* from, std::size_t bytes) override { std::memcpy(to, near(from), bytes); }
  void finish() override {}
  const char* registered_by(const ranks::LoadedPlugin& /*plugin*/, int /*device*/) const override { return ""; }
  void* register_at(const ranks::LoadedPlugin& /*plugin*/, int /*device*/, void* /*comm*/, std::byte* /*data*/,
                    std::size_t /*bytes*/) const override {
    return nullptr;
  }
  std::string describe() const override { return ""; }
  std::size_t in_use() const override { return 0; }

  static std::byte* near(const std::byte* far) {
    return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(far) ^ kDistance);
  }

 private:
  static constexpr std::uintptr_t kDistance = std::uintptr_t{1} << 60;  // no address of a program has this bit
  std::byte* do_allocate(std::size_t bytes) override { return near(host_->allocate(bytes)); }

  const std::unique_ptr<Memory> host_ = make_host_memory();
};

constexpr std::size_t kBlock = std::size_t{1} << 20;
constexpr std::size_t kBytes = 2 * kBlock + 7;
const workload::Pattern kContent(3, 4);

class FarContent : public testing::Test {
 protected:
  std::byte& at(std::size_t offset) { return *(FarMemory::near(data_) + offset); }

  FarMemory memory_;
  std::byte* const data_ = memory_.allocate(kBytes);
};

TEST_F(FarContent, Filled_IsTheContent) {
  fill(memory_, kContent, data_, kBytes, 5);
  EXPECT_EQ(0U, workload::verify(kContent, &at(0), kBytes, 5).wrong);
  EXPECT_EQ(0U, verify(memory_, kContent, data_, kBytes, 5).wrong);
  EXPECT_LT(kBytes * 9 / 10, verify(memory_, kContent, data_, kBytes, 6).wrong);
}

TEST_F(FarContent, Poisoned_DiffersInEveryByte) {
  poison(memory_, kContent, data_, kBytes, 5);
  EXPECT_EQ(kBytes, workload::verify(kContent, &at(0), kBytes, 5).wrong);
  EXPECT_EQ(kBytes, verify(memory_, kContent, data_, kBytes, 5).wrong);
}

TEST_F(FarContent, WrongBytesInSeveralBlocks_AreCountedAndTheFirstIsNamed) {
  fill(memory_, kContent, data_, kBytes);
  at(kBlock + 5) ^= std::byte{1};
  at(kBlock + 6) ^= std::byte{1};
  at(kBytes - 1) ^= std::byte{1};
  const workload::Mismatch found = verify(memory_, kContent, data_, kBytes);
  EXPECT_EQ(3U, found.wrong);
  EXPECT_EQ(kBlock + 5, found.first_offset);
  EXPECT_EQ(found.got ^ 1, found.expected);
  EXPECT_EQ(2U, verify(memory_, kContent, data_, kBytes, 0, 4).wrong) << "elements of four bytes";
}

TEST_F(FarContent, GuardOfABuffer_IsChecked) {
  GuardedBuffer buffer(memory_, 1000);
  EXPECT_FALSE(buffer.damage().has_value());
  for (const std::ptrdiff_t offset : {-1, 1000}) {
    *(FarMemory::near(buffer.data()) + offset) ^= std::byte{1};
    ASSERT_TRUE(buffer.damage().has_value());
    EXPECT_EQ(offset, buffer.damage()->offset);
    *(FarMemory::near(buffer.data()) + offset) ^= std::byte{1};
  }
}

}  // namespace
}  // namespace verbatim::memory
