// What is said of a registration that the device refuses: word for word, with the numbers that decide and the fix.
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
#include "support/fake_verbs.h"
#include "support/log_capture.h"
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

  // The line with which the device refuses, and which leaves nothing behind.
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
    EXPECT_TRUE(cache_->acquire(request)) << "the next one is as good as any";
    return log.only_warning();
  }
  // The same when there is no memory, under a soft limit of 64 KiB. What the machine decides becomes a '#'.
  std::string line_without_memory(const MrRequest& request) {
    rlimit before = {};
    getrlimit(RLIMIT_MEMLOCK, &before);
    const rlimit limited = {std::min<rlim_t>(before.rlim_max, 64 * 1024), before.rlim_max};
    setrlimit(RLIMIT_MEMLOCK, &limited);
    const std::string told = line(ENOMEM, request);
    setrlimit(RLIMIT_MEMLOCK, &before);
    return std::regex_replace(told, std::regex("\\(hard [^)]*\\), [0-9]+ KiB are locked"),
                              "(hard #), # KiB are locked");
  }

  FakeVerbs fake_;
  FakeDevice& device_ = fake_.add_device("mlx5_0");
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  std::optional<MrCache> cache_;
};

TEST_F(RegistrationErrorLine, HostMemoryRefused_GivesReason) {
  EXPECT_EQ(line(EFAULT, range(MemoryType::kHost)),
            "mlx5_0: ibv_reg_mr of 4096 bytes of host memory at 0x7f0000000000 failed: Bad address. Is it mapped, and "
            "may it be written? The application may have freed it");
  EXPECT_EQ(line(EINVAL, range(MemoryType::kHost)),
            "mlx5_0: ibv_reg_mr of 4096 bytes of host memory at 0x7f0000000000 failed: Invalid argument. Memory of a "
            "device or a file may not be pinned");
}

TEST_F(RegistrationErrorLine, GpuMemoryRefused_GivesReason) {
  EXPECT_EQ(
      line(EFAULT, range(MemoryType::kCuda)),
      "mlx5_0: ibv_reg_mr of 4096 bytes of GPU memory at 0x7f0000000000 failed: Bad address. Is a peer-memory "
      "module (nvidia_peermem) loaded, and is this GPU memory? An IOMMU refuses GPU memory as well: 'dmesg | grep "
      "-i -e iommu -e dmar'; boot with iommu=pt");
  EXPECT_EQ(line(EOPNOTSUPP, range(MemoryType::kCuda)),
            "mlx5_0: ibv_reg_mr of 4096 bytes of GPU memory at 0x7f0000000000 failed: Operation not supported. Is a "
            "peer-memory module (nvidia_peermem) loaded, and is this GPU memory?");
}

TEST_F(RegistrationErrorLine, DmaBufRefused_GivesReason) {
  EXPECT_EQ(line(EFAULT, range(MemoryType::kDmaBuf)),
            "mlx5_0: ibv_reg_dmabuf_mr of 4096 bytes of a dma-buf at 0x7f0000000000 failed: Bad address. An IOMMU "
            "refuses GPU memory as well: 'dmesg | grep -i -e iommu -e dmar'; boot with iommu=pt");
  EXPECT_EQ(line(EOPNOTSUPP, range(MemoryType::kDmaBuf)),
            "mlx5_0: ibv_reg_dmabuf_mr of 4096 bytes of a dma-buf at 0x7f0000000000 failed: Operation not supported. "
            "Needs Linux 5.12, a NIC driver that takes dma-bufs and the open GPU driver");
}

TEST_F(RegistrationErrorLine, BeyondLockedMemoryLimit_NamesLimit) {
  EXPECT_EQ(
      line_without_memory(range(MemoryType::kHost, 64 * kLinePage)),
      "mlx5_0: ibv_reg_mr of 262144 bytes of host memory at 0x7f0000000000 failed: Cannot allocate memory. "
      "RLIMIT_MEMLOCK is 64 KiB (hard #), # KiB are locked, 0 registrations are alive: raise the limit (ulimit -l "
      "unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1)");
}

// What fits into the limit was refused for another reason.
TEST_F(RegistrationErrorLine, WithinLockedMemoryLimit_SaysLimitIsNotTheCause) {
  EXPECT_EQ(
      line_without_memory(range(MemoryType::kHost, kLinePage)),
      "mlx5_0: ibv_reg_mr of 4096 bytes of host memory at 0x7f0000000000 failed: Cannot allocate memory. "
      "RLIMIT_MEMLOCK is 64 KiB (hard #), # KiB are locked, 0 registrations are alive: the limit is not the cause, "
      "the device or the system is out of memory or of regions");
}

TEST_F(RegistrationErrorLine, BeyondMaxMr_NamesMaxMr) {
  device_.attributes.max_mr = 2;
  const Result<MrRef> first = cache_->acquire(range(MemoryType::kHost));
  const Result<MrRef> second = cache_->acquire(range(MemoryType::kHost, kLinePage, 4 * kLinePage));
  ASSERT_TRUE(first && second);
  EXPECT_EQ(
      line_without_memory(range(MemoryType::kHost, kLinePage, 8 * kLinePage)),
      "mlx5_0: ibv_reg_mr of 4096 bytes of host memory at 0x7f0000008000 failed: Cannot allocate memory. "
      "RLIMIT_MEMLOCK is 64 KiB (hard #), # KiB are locked, the device takes 2 registrations, 2 registrations are "
      "alive: the device has no more (max_mr); fewer or larger buffers need fewer");
}

TEST_F(RegistrationErrorLine, BeyondMaxMrSize_NamesMaxMrSize) {
  device_.attributes.max_mr = 100;
  device_.attributes.max_mr_size = 4 * kLinePage;
  EXPECT_EQ(line_without_memory(range(MemoryType::kHost, 5 * kLinePage)),
            "mlx5_0: ibv_reg_mr of 20480 bytes of host memory at 0x7f0000000000 failed: Cannot allocate memory. "
            "RLIMIT_MEMLOCK is 64 KiB (hard #), # KiB are locked, the device takes 100 registrations, 0 registrations "
            "are alive: it takes 16384 bytes at a time (max_mr_size)");
}

}  // namespace
}  // namespace verbatim
