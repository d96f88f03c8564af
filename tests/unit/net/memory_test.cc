#include "net/memory.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "support/fake_verbs.h"
#include "support/log_capture.h"

namespace verbatim {
namespace {

class MemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"mlx5_0", "mlx5_1"}) {
      FakeDevice& fake = fake_.add_device(name);
      Result<std::unique_ptr<Device>> device = Device::open(fake_.table, nullptr, &fake.device, false);
      ASSERT_TRUE(device);
      devices_.push_back(std::move(*device));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      ports_[i].device = devices_[i].get();
      both_.push_back(&ports_[i]);
    }
  }

  FakeVerbs fake_;
  std::vector<std::unique_ptr<Device>> devices_;
  Port ports_[2];
  std::vector<const Port*> both_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(10000);
};

TEST_F(MemoryTest, EveryDeviceGetsItsKeys) {
  {
    const auto handle = register_memory(both_, {.address = buffer_.data(), .bytes = buffer_.size()});
    ASSERT_TRUE(handle);
    EXPECT_EQ(fake_.live("mr"), 2);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ((*handle)->lkey[i], (*handle)->references[i]->lkey);
      EXPECT_EQ((*handle)->rkey[i], (*handle)->references[i]->rkey);
    }
    EXPECT_FALSE((*handle)->device_memory);
  }
  EXPECT_EQ(fake_.live("mr"), 0);
}

TEST_F(MemoryTest, OnAllDevicesOrOnNone) {
  const LogCapture log;
  const auto first = register_memory({both_.data(), 1}, {.address = buffer_.data(), .bytes = buffer_.size()});
  ASSERT_TRUE(first);
  fake_.failures = {{"reg_mr", EINVAL}, {"reg_mr_iova2", EINVAL}};
  // The first device has the range already; the second refuses.
  EXPECT_FALSE(register_memory(both_, {.address = buffer_.data(), .bytes = buffer_.size()}));
  EXPECT_EQ(fake_.live("mr"), 1);
}

TEST_F(MemoryTest, OnlyDeviceMemoryWithBytesNeedsFlushing) {
  const auto device =
      register_memory(both_, {.address = buffer_.data(), .bytes = buffer_.size(), .type = MemoryType::kCuda});
  ASSERT_TRUE(device);
  EXPECT_TRUE((*device)->device_memory);
  const auto empty = register_memory(both_, {.address = buffer_.data(), .bytes = 0, .type = MemoryType::kCuda});
  ASSERT_TRUE(empty);
  EXPECT_FALSE((*empty)->device_memory);
}

TEST_F(MemoryTest, ControlMemoryIsZeroedPagesOfItsOwn) {
  {
    const Result<ControlMemory> control = ControlMemory::create(both_, 5000);
    ASSERT_TRUE(control);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(control->data()) % 4096, 0U);
    for (std::size_t i = 0; i < 5000; ++i) ASSERT_EQ(control->data()[i], std::byte{0});
    EXPECT_EQ(fake_.live("mr"), 2);
  }
  EXPECT_EQ(fake_.live("mr"), 0);
}

}  // namespace
}  // namespace verbatim
