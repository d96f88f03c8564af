//: in unit_net_lines

// Registrations that the device refuses, through a connection and with faults of softverbs: the log line, that the next
// one succeeds, and that nothing leaks.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#include "base/unique_fd.h"
#include "child_lines.h"
#include "connected_comms.h"
#include "support/child.h"
#include "support/log_lines.h"

namespace verbatim {
namespace {

constexpr std::size_t kBytes = std::size_t{1} << 20;

// A connection whose receiving end has memory with a file descriptor, as a dma-buf of a GPU has.
struct RegistrationEnds {
  RegistrationEnds() {
    link.connect();
    EXPECT_EQ(::ftruncate(file.get(), kBytes), 0);
    memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    EXPECT_NE(memory, MAP_FAILED);
  }
  ~RegistrationEnds() { ::munmap(memory, kBytes); }
  RegistrationEnds(const RegistrationEnds&) = delete;
  RegistrationEnds& operator=(const RegistrationEnds&) = delete;

  Result<std::unique_ptr<MemoryHandle>> reg(MemoryType type, std::size_t bytes = kBytes) {
    MrRequest request{.address = memory, .bytes = bytes, .type = type};
    if (type == MemoryType::kDmaBuf) request.dmabuf = {.fd = file.get(), .offset = 0};
    return link.recv().register_memory(request);
  }
  // Sends a message into this memory and compares the data.
  void expect_data(MemoryHandle& target) {
    std::vector<std::uint8_t> source = pattern(5000, 7);
    const auto source_memory = link.reg(link.send(), source);
    const RecvBuffer buffer{memory, source.size(), 0, &target};
    Request* const receive = link.posted([&] { return link.irecv({&buffer, 1}); });
    Request* const send = link.posted([&] { return link.isend(source.data(), source.size(), 0, *source_memory); });
    ASSERT_TRUE(link.wait(receive));
    ASSERT_TRUE(link.wait(send));
    link.is_completed(receive);
    link.is_completed(send);
    EXPECT_EQ(std::memcmp(memory, source.data(), source.size()), 0);
  }

  ConnectedComms link;
  UniqueFd file{::memfd_create("gpu", MFD_CLOEXEC)};
  void* memory = nullptr;
};

// The warnings of a child; also expects that no object of the device is left when it ends.
Lines lines_of(const std::string& faults, const std::function<void(RegistrationEnds&)>& act,
               const test::Variables& more = {}) {
  const std::string stats = testing::TempDir() + "registrations-" + std::to_string(::getpid());
  test::Variables variables = with_faults(faults);
  variables.emplace_back("SOFTVERBS_DMABUF", "1");
  variables.emplace_back("SOFTVERBS_STATS", stats);
  variables.insert(variables.end(), more.begin(), more.end());
  const Lines lines = warnings_of(test::check_in_child(variables, [&] {
    RegistrationEnds ends;
    act(ends);
  }));
  std::ifstream file(stats);
  const std::string counted{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(std::regex_search(counted, std::regex("\"mr\": *\\{[^}]*\"alive\": *0"))) << counted;
  EXPECT_FALSE(std::regex_search(counted, std::regex("\"alive\": *[1-9]"))) << counted;
  std::remove(stats.c_str());
  return lines;
}

TEST(RegistrationFailureLine, UnmappedHostMemory_IsReported) {
  const Lines warnings = lines_of("fail verb=reg_mr_iova2 errno=EFAULT", [](RegistrationEnds& ends) {
    const auto refused = ends.reg(MemoryType::kHost);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().sys_errno, EFAULT);
    const auto later = ends.reg(MemoryType::kHost);
    ASSERT_TRUE(later);
    ends.expect_data(**later);
  });
  test::expect_log_lines(warnings);
}

TEST(RegistrationFailureLine, DmaBufRefused_FallsBackWithOneLine) {
  const Lines warnings = lines_of("fail verb=reg_dmabuf_mr nth=3 count=2 errno=EOPNOTSUPP", [](RegistrationEnds& ends) {
    for (int i = 0; i < 3; ++i) {
      const auto one = ends.reg(MemoryType::kDmaBuf);
      ASSERT_TRUE(one) << i;
      EXPECT_TRUE((*one)->device_memory) << i;
      ends.expect_data(**one);
    }
  });
  test::expect_log_lines(warnings);
}

TEST(RegistrationFailureLine, DmaBufBehindIommu_IsRefusedWithReason) {
  const Lines warnings = lines_of("fail verb=reg_dmabuf_mr nth=3 errno=EINVAL", [](RegistrationEnds& ends) {
    const auto refused = ends.reg(MemoryType::kDmaBuf);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().sys_errno, EINVAL);
    const auto later = ends.reg(MemoryType::kDmaBuf);
    ASSERT_TRUE(later);
    ends.expect_data(**later);
  });
  test::expect_log_lines(warnings);
}

// What the machine decides becomes a '#'.
std::string without_limits(const std::string& line) {
  return std::regex_replace(line, std::regex("\\(hard [^)]*\\), [0-9]+ KiB are locked"), "(hard #), # KiB are locked");
}

TEST(RegistrationFailureLine, BeyondLockedMemoryLimit_NamesLimitAndSmallerSucceeds) {
  const Lines warnings = lines_of("registration max-bytes=512K", [](RegistrationEnds& ends) {
    rlimit limit = {};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    limit.rlim_cur = 512 * 1024;
    ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    const auto refused = ends.reg(MemoryType::kHost);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().sys_errno, ENOMEM);
    const auto smaller = ends.reg(MemoryType::kHost, kBytes / 2);
    ASSERT_TRUE(smaller);
    ends.expect_data(**smaller);
  });
  ASSERT_EQ(warnings.size(), 1U) << testing::PrintToString(warnings);
  test::expect_log_lines({without_limits(warnings[0])});
}

// Two registrations are the connection's own.
TEST(RegistrationFailureLine, BeyondDeviceMaxMr_NamesLimitAndFewerSucceed) {
  const Lines warnings = lines_of("seed=1",
                                  [](RegistrationEnds& ends) {
                                    std::vector<std::unique_ptr<MemoryHandle>> held;
                                    for (std::size_t i = 1; i <= 2; ++i)
                                      held.push_back(*ends.reg(MemoryType::kHost, 4096 * i));
                                    const auto refused = ends.reg(MemoryType::kHost);
                                    ASSERT_FALSE(refused);
                                    EXPECT_EQ(refused.error().sys_errno, ENOMEM);
                                    held.pop_back();
                                    EXPECT_TRUE(ends.reg(MemoryType::kHost));
                                  },
                                  {{"SOFTVERBS_MAX_MR", "4"}});
  ASSERT_EQ(warnings.size(), 1U) << testing::PrintToString(warnings);
  test::expect_log_lines(
      {std::regex_replace(without_limits(warnings[0]), std::regex("MEMLOCK is [^(]*"), "MEMLOCK is # ")});
}

}  // namespace
}  // namespace verbatim
