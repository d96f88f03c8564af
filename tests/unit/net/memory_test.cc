#include "net/transfer/memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>

#include "base/unique_fd.h"
#include "support/log_lines.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"

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

TEST_F(MemoryTest, TwoDevices_EachHasItsKeys) {
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

TEST_F(MemoryTest, OneDeviceRefuses_NoneIsRegistered) {
  const LogCapture log;
  const auto first = register_memory({both_.data(), 1}, {.address = buffer_.data(), .bytes = buffer_.size()});
  ASSERT_TRUE(first);
  fake_.failures = {{"reg_mr", EINVAL}, {"reg_mr_iova2", EINVAL}};
  // The first device has the range already; the second refuses.
  EXPECT_FALSE(register_memory(both_, {.address = buffer_.data(), .bytes = buffer_.size()}));
  EXPECT_EQ(fake_.live("mr"), 1);
}

TEST_F(MemoryTest, EmptyDeviceMemory_NeedsNoFlush) {
  const auto device =
      register_memory(both_, {.address = buffer_.data(), .bytes = buffer_.size(), .type = MemoryType::kCuda});
  ASSERT_TRUE(device);
  EXPECT_TRUE((*device)->device_memory);
  const auto empty = register_memory(both_, {.address = buffer_.data(), .bytes = 0, .type = MemoryType::kCuda});
  ASSERT_TRUE(empty);
  EXPECT_FALSE((*empty)->device_memory);
}

TEST_F(MemoryTest, DmaBufRefused_FallsBackToPeerMemory) {
  const LogCapture log;
  const UniqueFd fd(::memfd_create("gpu", MFD_CLOEXEC));
  fake_.devices()[0]->dmabuf_errno = 0;
  fake_.devices()[1]->dmabuf_errno = EOPNOTSUPP;
  const auto place = reinterpret_cast<std::uintptr_t>(buffer_.data());
  const MrRequest request{.address = buffer_.data(),
                          .bytes = buffer_.size(),
                          .type = MemoryType::kDmaBuf,
                          .dmabuf = {.fd = fd.get(), .offset = place % 4096}};
  for (int i = 0; i < 2; ++i) {
    const auto handle = register_memory(both_, request);
    ASSERT_TRUE(handle);
    EXPECT_TRUE((*handle)->device_memory);
  }
  const auto made = fake_.registrations();
  ASSERT_EQ(made.size(), 4U);
  EXPECT_EQ(made[0].verb, "reg_dmabuf_mr");
  EXPECT_EQ(made[1].verb, "reg_mr");
  EXPECT_EQ(made[1].address, made[0].address);
  EXPECT_EQ(made[1].bytes, made[0].bytes);
  test::expect_log_lines(log.warnings());
}

// NCCL registers the memory itself then, or refuses a buffer of several allocations, which peer memory cannot register.
TEST_F(MemoryTest, DmaBufRefusedForAnotherReason_DoesNotFallBack) {
  const UniqueFd fd(::memfd_create("gpu", MFD_CLOEXEC));
  fake_.devices()[0]->dmabuf_errno = 0;
  for (const int code : {EINVAL, EFAULT, EIO, ENOMEM, EBADF, EPERM}) {
    const LogCapture log;
    fake_.failures["reg_dmabuf_mr"] = code;
    const auto refused = register_memory(
        {both_.data(), 1},
        {.address = buffer_.data(), .bytes = 1, .type = MemoryType::kDmaBuf, .dmabuf = {.fd = fd.get(), .offset = 0}});
    ASSERT_FALSE(refused) << code;
    EXPECT_EQ(refused.error().sys_errno, code);
    EXPECT_TRUE(refused.error().logged);
    EXPECT_EQ(log.only_warning().rfind("mlx5_0: ibv_reg_dmabuf_mr of 4096 bytes of a dma-buf at ", 0), 0U);
  }
  EXPECT_EQ(fake_.calls("reg_mr"), 0);
}

// The device would reach the memory on two ways without an order.
TEST_F(MemoryTest, DataDirectRefused_DoesNotFallBack) {
  Mlx5 library;
  library.is_supported = [](ibv_device*) { return true; };
  library.query_device = [](ibv_context*, mlx5dv_context*) { return 0; };
  library.reg_dmabuf_mr = [](ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int, int) -> ibv_mr* {
    errno = EOPNOTSUPP;
    return nullptr;
  };
  const auto device = Device::open(fake_.table, &library, &fake_.devices()[0]->device, false);
  ASSERT_TRUE(device);
  Port port = ports_[0];
  port.device = device->get();
  port.data_direct = true;
  const LogCapture log;
  const UniqueFd fd(::memfd_create("gpu", MFD_CLOEXEC));
  const Port* const ports[] = {&port};
  const auto refused = register_memory(
      ports,
      {.address = buffer_.data(), .bytes = 1, .type = MemoryType::kDmaBuf, .dmabuf = {.fd = fd.get(), .offset = 0}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().sys_errno, EOPNOTSUPP);
  EXPECT_EQ(fake_.calls("reg_mr"), 0);
  EXPECT_EQ(log.only_warning().rfind("mlx5_0: mlx5dv_reg_dmabuf_mr of 4096 bytes of a dma-buf at ", 0), 0U)
      << log.only_warning();
}

TEST_F(MemoryTest, DmaBufProtocolNotSupported_FallsBackToPeerMemory) {
  const LogCapture log;
  const UniqueFd fd(::memfd_create("gpu", MFD_CLOEXEC));
  fake_.devices()[0]->dmabuf_errno = EPROTONOSUPPORT;
  EXPECT_TRUE(register_memory(
      {both_.data(), 1},
      {.address = buffer_.data(), .bytes = 1, .type = MemoryType::kDmaBuf, .dmabuf = {.fd = fd.get(), .offset = 0}}));
  EXPECT_EQ(fake_.calls("reg_mr"), 1);
}

TEST_F(MemoryTest, DmaBufAndPeerMemoryRefused_OneLineWithBothReasons) {
  const LogCapture log;
  const UniqueFd fd(::memfd_create("gpu", MFD_CLOEXEC));
  fake_.devices()[0]->dmabuf_errno = EOPNOTSUPP;
  fake_.failures["reg_mr"] = EFAULT;
  EXPECT_FALSE(register_memory(
      {both_.data(), 1},
      {.address = buffer_.data(), .bytes = 1, .type = MemoryType::kDmaBuf, .dmabuf = {.fd = fd.get(), .offset = 0}}));
  const std::string line = log.only_warning();
  EXPECT_NE(line.find("of GPU memory"), std::string::npos) << line;
  EXPECT_NE(
      line.find("Bad address. Next: load a peer-memory module (nvidia_peermem) and check that this is GPU memory; "
                "check whether an IOMMU prevents access"),
      std::string::npos)
      << line;
  EXPECT_NE(line.find("boot with iommu=pt). Registration as a dma-buf failed: Operation not supported"),
            std::string::npos)
      << line;
}

TEST_F(MemoryTest, DmaBufOutOfMemory_IsTriedOnceAndReportedOnce) {
  const LogCapture log;
  const UniqueFd fd(::memfd_create("gpu", MFD_CLOEXEC));
  fake_.devices()[0]->dmabuf_errno = 0;
  fake_.failures["reg_dmabuf_mr"] = ENOMEM;
  const auto refused = register_memory(
      {both_.data(), 1},
      {.address = buffer_.data(), .bytes = 1, .type = MemoryType::kDmaBuf, .dmabuf = {.fd = fd.get(), .offset = 0}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().sys_errno, ENOMEM);
  EXPECT_TRUE(refused.error().logged);
  EXPECT_EQ(fake_.calls("reg_dmabuf_mr"), 1);
  EXPECT_EQ(fake_.calls("reg_mr"), 0);
  const std::string line = log.only_warning();
  EXPECT_NE(line.find("ibv_reg_dmabuf_mr of 4096 bytes of a dma-buf"), std::string::npos) << line;
  EXPECT_NE(line.find("RLIMIT_MEMLOCK is"), std::string::npos) << line;
}

TEST_F(MemoryTest, ControlMemory_IsZeroedAndPageAligned) {
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
