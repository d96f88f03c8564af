// The log lines of registrations that fail: complete lines, with the cause, the next step and the limits.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"
#include "verbs/mr_cache.h"

namespace verbatim {
namespace {

constexpr std::uintptr_t kLinePage = 4096;
constexpr std::uintptr_t kLineBase = 0x7f0000000000;

class RegistrationErrorLine : public testing::Test {
 protected:
  RegistrationErrorLine() {
    device_.add_roce_port();
    device_.dmabuf_errno = 0;
    context_ = fake_.table.open_device(&device_.device);
    pd_ = fake_.table.alloc_pd(context_);
    cache_.emplace(fake_.table, pd_, "mlx5_0", false);
  }
  ~RegistrationErrorLine() override {
    cache_.reset();
    EXPECT_EQ(fake_.live("mr"), 0);
    fake_.table.dealloc_pd(pd_);
    fake_.table.close_device(context_);
  }

  static MrRequest range(MemoryType type, std::size_t bytes = kLinePage, std::uintptr_t offset = 0) {
    return {.address = reinterpret_cast<void*>(kLineBase + offset), .bytes = bytes, .type = type};
  }

  // The line of a registration that fails with `code`. Also checks that the failure leaves nothing in the cache.
  std::string line(int code, MrRequest request) {
    const UniqueFd fd(::memfd_create("gpu", MFD_CLOEXEC));
    const bool dmabuf = request.type == MemoryType::kDmaBuf;
    if (dmabuf) request.dmabuf = {.fd = fd.get(), .offset = 0};
    const std::size_t before = cache_->size();
    const LogCapture log;
    fake_.failures[dmabuf ? "reg_dmabuf_mr" : "reg_mr"] = code;
    const Result<MrRef> refused = cache_->acquire(request);
    fake_.failures.clear();
    EXPECT_FALSE(refused);
    if (!refused) {
      EXPECT_EQ(refused.error().sys_errno, code);
      EXPECT_TRUE(refused.error().logged);
    }
    EXPECT_EQ(cache_->size(), before);
    EXPECT_TRUE(cache_->acquire(request)) << "a registration after the failure must work";
    return log.only_warning();
  }
  // The line after ENOMEM, under a soft limit of 64 KiB. Numbers that depend on the machine are replaced by '#'.
  std::string line_without_memory(const MrRequest& request) {
    rlimit before = {};
    getrlimit(RLIMIT_MEMLOCK, &before);
    const rlimit limited = {std::min<rlim_t>(before.rlim_max, 64 * 1024), before.rlim_max};
    setrlimit(RLIMIT_MEMLOCK, &limited);
    const std::string logged = line(ENOMEM, request);
    setrlimit(RLIMIT_MEMLOCK, &before);
    return std::regex_replace(logged, std::regex("\\(hard [^)]*\\), [0-9]+ KiB are locked"),
                              "(hard #), # KiB are locked");
  }

  FakeVerbs fake_;
  FakeDevice& device_ = fake_.add_device("mlx5_0");
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  std::optional<MrCache> cache_;
};

TEST_F(RegistrationErrorLine, DataDirectRefused_NamesItsSetting) {
  static int code;
  cache_.emplace(fake_.table, pd_, "mlx5_0", false,
                 [](ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int, int) -> ibv_mr* {
                   errno = code;
                   return nullptr;
                 });
  const UniqueFd fd(::memfd_create("gpu", MFD_CLOEXEC));
  MrRequest request = range(MemoryType::kDmaBuf);
  request.dmabuf = {.fd = fd.get(), .offset = 0};
  request.data_direct = true;
  const auto refused = [&](int error) {
    code = error;
    const LogCapture log;
    const Result<MrRef> result = cache_->acquire(request);
    EXPECT_FALSE(result);
    if (!result) {
      EXPECT_EQ(result.error().sys_errno, error);
    }
    return log.only_warning();
  };
  EXPECT_EQ(refused(EIO),
            "mlx5_0: mlx5dv_reg_dmabuf_mr of 4096 bytes of a dma-buf at 0x7f0000000000 failed: Input/output error. "
            "Next: set NCCL_IB_DATA_DIRECT=0");
  EXPECT_EQ(refused(EINVAL),
            "mlx5_0: mlx5dv_reg_dmabuf_mr of 4096 bytes of a dma-buf at 0x7f0000000000 failed: Invalid argument. Next: "
            "check whether an IOMMU prevents access to GPU memory ('dmesg | grep -i -e iommu -e dmar'; boot with "
            "iommu=pt), or set NCCL_IB_DATA_DIRECT=0");
  // NCCL asks for the mapping also when the device is used without Data Direct (VERBATIM_DATA_DIRECT=0).
  constexpr int kRefusedByGpuDriver = 524;
  EXPECT_TRUE(refused(kRefusedByGpuDriver).ends_with(". Next: set NCCL_IB_DATA_DIRECT=0"));
  EXPECT_TRUE(line(kRefusedByGpuDriver, range(MemoryType::kDmaBuf)).ends_with(". Next: set NCCL_IB_DATA_DIRECT=0"));
}

TEST_F(RegistrationErrorLine, HostMemoryRefused_GivesReason) {
  EXPECT_EQ(line(EFAULT, range(MemoryType::kHost)),
            "mlx5_0: ibv_reg_mr of 4096 bytes of host memory at 0x7f0000000000 failed: Bad address. Next: check that "
            "the application has not freed the memory and may write to it");
  EXPECT_EQ(line(EINVAL, range(MemoryType::kHost)),
            "mlx5_0: ibv_reg_mr of 4096 bytes of host memory at 0x7f0000000000 failed: Invalid argument. Next: use "
            "other memory; mappings of a device or a file cannot always be pinned");
}

TEST_F(RegistrationErrorLine, GpuMemoryRefused_GivesReason) {
  EXPECT_EQ(
      line(EFAULT, range(MemoryType::kCuda)),
      "mlx5_0: ibv_reg_mr of 4096 bytes of GPU memory at 0x7f0000000000 failed: Bad address. Next: load a "
      "peer-memory module (nvidia_peermem) and check that this is GPU memory; check whether an IOMMU prevents access "
      "to GPU memory ('dmesg | grep -i -e iommu -e dmar'; boot with iommu=pt)");
  EXPECT_EQ(line(EOPNOTSUPP, range(MemoryType::kCuda)),
            "mlx5_0: ibv_reg_mr of 4096 bytes of GPU memory at 0x7f0000000000 failed: Operation not supported. Next: "
            "load a peer-memory module (nvidia_peermem) and check that this is GPU memory");
}

TEST_F(RegistrationErrorLine, DmaBufRefused_GivesReason) {
  EXPECT_EQ(line(EFAULT, range(MemoryType::kDmaBuf)),
            "mlx5_0: ibv_reg_dmabuf_mr of 4096 bytes of a dma-buf at 0x7f0000000000 failed: Bad address. Next: check "
            "whether an IOMMU prevents access to GPU memory ('dmesg | grep -i -e iommu -e dmar'; boot with iommu=pt)");
  EXPECT_EQ(line(EOPNOTSUPP, range(MemoryType::kDmaBuf)),
            "mlx5_0: ibv_reg_dmabuf_mr of 4096 bytes of a dma-buf at 0x7f0000000000 failed: Operation not supported. "
            "Next: use Linux 5.12 or later, a NIC driver that supports dma-bufs and the open GPU driver");
}

TEST_F(RegistrationErrorLine, BeyondLockedMemoryLimit_NamesLimit) {
  EXPECT_EQ(
      line_without_memory(range(MemoryType::kHost, 64 * kLinePage)),
      "mlx5_0: ibv_reg_mr of 262144 bytes of host memory at 0x7f0000000000 failed: Cannot allocate memory. "
      "RLIMIT_MEMLOCK is exceeded. Next: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1). "
      "RLIMIT_MEMLOCK is 64 KiB (hard #), # KiB are locked, 0 registrations exist");
}

// The range is below the limit, so the failure has another cause.
TEST_F(RegistrationErrorLine, WithinLockedMemoryLimit_SaysLimitIsNotTheCause) {
  EXPECT_EQ(
      line_without_memory(range(MemoryType::kHost, kLinePage)),
      "mlx5_0: ibv_reg_mr of 4096 bytes of host memory at 0x7f0000000000 failed: Cannot allocate memory. "
      "RLIMIT_MEMLOCK is not the cause. Next: free memory of the host or registrations of the device. RLIMIT_MEMLOCK "
      "is 64 KiB (hard #), # KiB are locked, 0 registrations exist");
}

// Drivers do not count a dma-buf as locked memory. They do count peer memory.
TEST_F(RegistrationErrorLine, NoMemoryForGpuMemory_NamesBar1) {
  const std::string rest =
      "Next: look with 'nvidia-smi -q -d MEMORY' whether the GPU's BAR1, through which NICs reach its memory, is full, "
      "and register less GPU memory then. RLIMIT_MEMLOCK is 64 KiB (hard #), # KiB are locked, 0 registrations exist";
  EXPECT_EQ(line_without_memory(range(MemoryType::kDmaBuf, 64 * kLinePage)),
            "mlx5_0: ibv_reg_dmabuf_mr of 262144 bytes of a dma-buf at 0x7f0000000000 failed: Cannot allocate memory. "
            "RLIMIT_MEMLOCK is not the cause. " +
                rest);
  EXPECT_EQ(line_without_memory(range(MemoryType::kCuda)),
            "mlx5_0: ibv_reg_mr of 4096 bytes of GPU memory at 0x7f0000000000 failed: Cannot allocate memory. "
            "RLIMIT_MEMLOCK is not the cause. " +
                rest);
  EXPECT_NE(line_without_memory(range(MemoryType::kCuda, 64 * kLinePage)).find("RLIMIT_MEMLOCK is exceeded"),
            std::string::npos);
}

TEST_F(RegistrationErrorLine, ControlGroupIsFull_NamesItsFile) {
  for (const MemoryType type : {MemoryType::kHost, MemoryType::kCuda, MemoryType::kDmaBuf}) {
    const std::string logged = line(EAGAIN, range(type));
    EXPECT_TRUE(
        logged.ends_with("failed: Resource temporarily unavailable. The limit of the rdma control group is "
                         "reached, or the device has nothing left. Next: compare hca_object of mlx5_0 in the "
                         "group's file rdma.max with 'rdma resource show'"))
        << logged;
  }
}

TEST_F(RegistrationErrorLine, BeyondMaxMr_NamesMaxMr) {
  device_.attributes.max_mr = 2;
  const Result<MrRef> first = cache_->acquire(range(MemoryType::kHost));
  const Result<MrRef> second = cache_->acquire(range(MemoryType::kHost, kLinePage, 4 * kLinePage));
  ASSERT_TRUE(first && second);
  EXPECT_EQ(
      line_without_memory(range(MemoryType::kHost, kLinePage, 8 * kLinePage)),
      "mlx5_0: ibv_reg_mr of 4096 bytes of host memory at 0x7f0000008000 failed: Cannot allocate memory. "
      "The device's maximum of registrations (max_mr) is reached. Next: use fewer or larger buffers. RLIMIT_MEMLOCK is "
      "64 KiB (hard #), # KiB are locked, the device supports 2 registrations, 2 registrations exist");
}

TEST_F(RegistrationErrorLine, BeyondMaxMrSize_NamesMaxMrSize) {
  device_.attributes.max_mr = 100;
  device_.attributes.max_mr_size = 4 * kLinePage;
  EXPECT_EQ(line_without_memory(range(MemoryType::kHost, 5 * kLinePage)),
            "mlx5_0: ibv_reg_mr of 20480 bytes of host memory at 0x7f0000000000 failed: Cannot allocate memory. "
            "The device registers at most 16384 bytes at once (max_mr_size). Next: use smaller buffers. RLIMIT_MEMLOCK "
            "is 64 KiB (hard #), # KiB are locked, the device supports 100 registrations, 0 registrations exist");
}

}  // namespace
}  // namespace verbatim
