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
#include "support/log_lines.h"
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
  test::expect_log_lines({refused(EIO), refused(EINVAL)});
  // NCCL asks for the mapping also when the device is used without Data Direct (VERBATIM_DATA_DIRECT=0).
  constexpr int kRefusedByGpuDriver = 524;
  EXPECT_TRUE(refused(kRefusedByGpuDriver).ends_with(". Next: set NCCL_IB_DATA_DIRECT=0"));
  EXPECT_TRUE(line(kRefusedByGpuDriver, range(MemoryType::kDmaBuf)).ends_with(". Next: set NCCL_IB_DATA_DIRECT=0"));
}

TEST_F(RegistrationErrorLine, HostMemoryRefused_GivesReason) {
  test::expect_log_lines({line(EFAULT, range(MemoryType::kHost)), line(EINVAL, range(MemoryType::kHost))});
}

TEST_F(RegistrationErrorLine, GpuMemoryRefused_GivesReason) {
  test::expect_log_lines({line(EFAULT, range(MemoryType::kCuda)), line(EOPNOTSUPP, range(MemoryType::kCuda))});
}

TEST_F(RegistrationErrorLine, DmaBufRefused_GivesReason) {
  test::expect_log_lines({line(EFAULT, range(MemoryType::kDmaBuf)), line(EOPNOTSUPP, range(MemoryType::kDmaBuf))});
}

TEST_F(RegistrationErrorLine, BeyondLockedMemoryLimit_NamesLimit) {
  test::expect_log_lines({line_without_memory(range(MemoryType::kHost, 64 * kLinePage))});
}

// The range is below the limit, so the failure has another cause.
TEST_F(RegistrationErrorLine, WithinLockedMemoryLimit_SaysLimitIsNotTheCause) {
  test::expect_log_lines({line_without_memory(range(MemoryType::kHost, kLinePage))});
}

// Drivers do not count a dma-buf as locked memory. They do count peer memory.
TEST_F(RegistrationErrorLine, NoMemoryForGpuMemory_NamesBar1) {
  test::expect_log_lines(
      {line_without_memory(range(MemoryType::kDmaBuf, 64 * kLinePage)), line_without_memory(range(MemoryType::kCuda))});
  EXPECT_NE(line_without_memory(range(MemoryType::kCuda, 64 * kLinePage)).find("RLIMIT_MEMLOCK is exceeded"),
            std::string::npos);
}

TEST_F(RegistrationErrorLine, ControlGroupIsFull_NamesItsFile) {
  test::expect_log_lines({line(EAGAIN, range(MemoryType::kHost)), line(EAGAIN, range(MemoryType::kCuda)),
                          line(EAGAIN, range(MemoryType::kDmaBuf))});
}

TEST_F(RegistrationErrorLine, BeyondMaxMr_NamesMaxMr) {
  device_.attributes.max_mr = 2;
  const Result<MrRef> first = cache_->acquire(range(MemoryType::kHost));
  const Result<MrRef> second = cache_->acquire(range(MemoryType::kHost, kLinePage, 4 * kLinePage));
  ASSERT_TRUE(first && second);
  test::expect_log_lines({line_without_memory(range(MemoryType::kHost, kLinePage, 8 * kLinePage))});
}

TEST_F(RegistrationErrorLine, BeyondMaxMrSize_NamesMaxMrSize) {
  device_.attributes.max_mr = 100;
  device_.attributes.max_mr_size = 4 * kLinePage;
  test::expect_log_lines({line_without_memory(range(MemoryType::kHost, 5 * kLinePage))});
}

}  // namespace
}  // namespace verbatim
