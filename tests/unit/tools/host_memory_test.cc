//: program tools_memory_test link=memory,gtest
//: test tools-memory suite=unit protocol=gtest

// The pages of host memory.
#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "memory/memory.h"

namespace verbatim::memory {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// The flags of the kernel for the mapping that has this address: "rd wr mr mw me ac hg"; hg: huge pages, nh: none.
std::string flags_at(const std::byte* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  std::ifstream file("/proc/self/smaps");
  bool is_here = false;
  for (std::string line; std::getline(file, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2)
      is_here = begin <= address && address < end;
    if (is_here && line.starts_with("VmFlags:")) return line + " ";
  }
  return {};
}

class HostPages : public testing::Test {
 protected:
  void SetUp() override {
    if (std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled").fail())
      GTEST_SKIP() << "this kernel has no huge pages";
  }
};

TEST_F(HostPages, AreThoseAskedFor) {
  const auto huge = make_host_memory(Pages::kHuge);
  const auto small = make_host_memory(Pages::kSmall);
  const auto any = make_host_memory();
  const std::string flags_of_huge = flags_at(huge->allocate(4 * kHugePage));
  const std::string flags_of_small = flags_at(small->allocate(4 * kHugePage));
  const std::string flags_of_any = flags_at(any->allocate(4 * kHugePage));
  if (flags_of_any.empty()) GTEST_SKIP() << "this kernel shows no flags in /proc/self/smaps";
  EXPECT_NE(flags_of_huge.find(" hg "), std::string::npos) << flags_of_huge;
  EXPECT_NE(flags_of_small.find(" nh "), std::string::npos) << flags_of_small;
  for (const char* const flag : {" hg ", " nh "}) EXPECT_EQ(flags_of_any.find(flag), std::string::npos) << flags_of_any;
}

TEST_F(HostPages, AreNamed) {
  EXPECT_EQ(make_host_memory(Pages::kSmall)->describe(), "host memory, small pages");
  EXPECT_EQ(make_host_memory()->describe(), "host memory");
  std::string enabled;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), enabled);
  EXPECT_EQ(make_host_memory(Pages::kHuge)->describe(),
            enabled.find("[never]") == std::string::npos ? "host memory, huge pages"
                                                         : "host memory, small pages (this kernel gives no huge ones)");
}

}  // namespace
}  // namespace verbatim::memory
