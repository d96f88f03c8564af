//: in softverbs_fault_test

// Registrations count against RLIMIT_MEMLOCK as with a hardware device, unless SOFTVERBS_LOCK_LIMIT=none.
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "support/child.h"
#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kPage = 4096;

bool has_capability() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3]{};
  return syscall(SYS_capget, &header, data) == 0 && (data[0].effective & CAP_TO_MASK(CAP_IPC_LOCK)) != 0;
}

void drop_capability() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3]{};
  ASSERT_EQ(syscall(SYS_capget, &header, data), 0);
  data[0].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
  ASSERT_EQ(syscall(SYS_capset, &header, data), 0);
}

void limit_to(std::size_t pages) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  limit.rlim_cur = pages * kPage;
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
}

Mr register_local(const Device& device, std::byte* bytes, std::size_t length) {
  errno = 0;
  return Mr(verbs().reg_mr(device.pd.get(), bytes, length, IBV_ACCESS_LOCAL_WRITE));
}

std::size_t lines(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(LockLimit, OrdinaryUser_RegistersNoMore) {
  const std::string printed = check_in_child({{"SOFTVERBS_LOCK_LIMIT", "kernel"}}, [] {
    drop_capability();
    limit_to(4);
    const Device device = open_device();
    const GuardedBuffer pages(5 * kPage);
    const Mr first = register_local(device, pages.data() + kPage - 1, 2);  // two bytes pin two pages
    Mr second = register_local(device, pages.data(), 2 * kPage);           // pages of two regions count twice
    EXPECT_NE(first, nullptr);
    EXPECT_NE(second, nullptr);
    for (int attempt = 0; attempt < 2; ++attempt) {
      EXPECT_EQ(register_local(device, pages.data(), 1), nullptr);
      EXPECT_EQ(errno, ENOMEM);
    }
    second.reset();
    EXPECT_EQ(register_local(device, pages.data(), 3 * kPage), nullptr);
    EXPECT_NE(register_local(device, pages.data(), 2 * kPage), nullptr);
  });
  EXPECT_EQ(lines(printed), 1U) << printed;
  EXPECT_NE(printed.find("would have 20 KiB of registered memory, and its limit is 16 KiB"), std::string::npos)
      << printed;
}

UniqueFd dmabuf() {
  UniqueFd file(memfd_create("dmabuf", MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(file.get(), 4 * kPage), 0);
  return file;
}

// A dma-buf is not pinned, so the kernel does not count it.
TEST(LockLimit, Dmabuf_DoesNotCount) {
  check_in_child({{"SOFTVERBS_LOCK_LIMIT", "kernel"}, {"SOFTVERBS_DMABUF", "1"}}, [] {
    drop_capability();
    limit_to(1);
    const Device device = open_device();
    const UniqueFd file = dmabuf();
    const Mr mr(verbs().reg_dmabuf_mr(device.pd.get(), 0, 4 * kPage, 0, file.get(), kAllAccess));
    EXPECT_NE(mr, nullptr);
    const GuardedBuffer page(kPage);
    const Mr other = register_local(device, page.data(), kPage);
    EXPECT_NE(other, nullptr);
    EXPECT_EQ(register_local(device, page.data(), 1), nullptr);
  });
}

// A wrong count of two threads lasts only for some instructions, hence the number of rounds.
TEST(LockLimit, DmabufsOfOtherThreads_DoNotCount) {
  check_in_child({{"SOFTVERBS_LOCK_LIMIT", "kernel"}, {"SOFTVERBS_DMABUF", "1"}}, [] {
    drop_capability();
    limit_to(1);
    const Device device = open_device();
    const UniqueFd file = dmabuf();
    constexpr int kRounds = 20000;
    std::atomic<int> running{2};
    std::vector<std::thread> others(2);
    for (std::thread& other : others) {
      other = std::thread([&] {
        for (int i = 0; i < kRounds; ++i) {
          EXPECT_NE(Mr(verbs().reg_dmabuf_mr(device.pd.get(), 0, 4 * kPage, 0, file.get(), kAllAccess)), nullptr);
        }
        --running;
      });
    }
    const GuardedBuffer page(kPage);
    int refused = 0;
    while (running != 0) refused += register_local(device, page.data(), 1) == nullptr ? 1 : 0;
    for (std::thread& other : others) other.join();
    EXPECT_EQ(refused, 0);
  });
}

TEST(LockLimit, ForkedChild_DoesNotInheritRegions) {
  // With the inline engine, because a process that forks must have no other threads (check_in_child).
  check_in_child({{"SOFTVERBS_LOCK_LIMIT", "kernel"}, {"SOFTVERBS_ENGINE", "inline"}}, [] {
    drop_capability();
    limit_to(2);
    const GuardedBuffer pages(2 * kPage);
    const Device device = open_device();
    const Mr mr = register_local(device, pages.data(), 2 * kPage);
    EXPECT_NE(mr, nullptr);
    check_in_child({}, [&] {
      const Device own = open_device();
      EXPECT_NE(register_local(own, pages.data(), 2 * kPage), nullptr);
    });
  });
}

TEST(LockLimit, SettingNone_IsNotEnforced) {
  check_in_child({{"SOFTVERBS_LOCK_LIMIT", "none"}}, [] {
    drop_capability();
    limit_to(1);
    const Device device = open_device();
    const GuardedBuffer pages(2 * kPage);
    EXPECT_NE(register_local(device, pages.data(), 2 * kPage), nullptr);
  });
}

TEST(LockLimit, RootOfHost_IsExempt) {
  std::string map;
  std::getline(std::ifstream("/proc/self/uid_map"), map);
  if (!has_capability() || map.find("4294967295") == std::string::npos) {
    GTEST_SKIP() << "needs CAP_IPC_LOCK in the initial user namespace";
  }
  check_in_child({{"SOFTVERBS_LOCK_LIMIT", "kernel"}}, [] {
    limit_to(1);
    const Device device = open_device();
    const GuardedBuffer pages(2 * kPage);
    EXPECT_NE(register_local(device, pages.data(), 2 * kPage), nullptr);
  });
}

}  // namespace
}  // namespace verbatim::test
