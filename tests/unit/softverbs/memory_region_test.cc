// Protection domains and memory regions: life cycle, keys and access rules.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <set>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class MemoryRegion : public testing::Test {
 protected:
  Device device = open_device();
  std::vector<std::byte> bytes = std::vector<std::byte>(16384);
};

TEST_F(MemoryRegion, NewRegion_HasItsAttributes) {
  const Mr mr = reg_mr(device.pd.get(), bytes.data(), bytes.size());
  EXPECT_EQ(mr->addr, bytes.data());
  EXPECT_EQ(mr->length, bytes.size());
  EXPECT_EQ(mr->pd, device.pd.get());
  EXPECT_EQ(mr->context, device.context.get());
}

TEST_F(MemoryRegion, LiveRegions_HaveDistinctKeys) {
  std::vector<Mr> regions;
  std::set<std::uint32_t> rkeys;
  std::set<std::uint32_t> lkeys;
  for (int i = 0; i < 100; ++i) {
    regions.push_back(reg_mr(device.pd.get(), bytes.data() + i, bytes.size() / 2));  // regions may overlap
    rkeys.insert(regions.back()->rkey);
    lkeys.insert(regions.back()->lkey);
  }
  EXPECT_EQ(rkeys.size(), regions.size());
  EXPECT_EQ(lkeys.size(), regions.size());
}

TEST_F(MemoryRegion, KeyOfDeregisteredRegion_IsNotReusedAtOnce) {
  Mr first = reg_mr(device.pd.get(), bytes.data(), bytes.size());
  const std::uint32_t rkey = first->rkey;
  first.reset();
  const Mr second = reg_mr(device.pd.get(), bytes.data(), bytes.size());
  EXPECT_NE(second->rkey, rkey);  // otherwise a late access with the old key would succeed
}

TEST_F(MemoryRegion, RemoteWriteWithoutLocalWrite_IsRefused) {
  for (const int access : {int{IBV_ACCESS_REMOTE_WRITE}, int{IBV_ACCESS_REMOTE_ATOMIC}}) {
    errno = 0;
    EXPECT_EQ(verbs().reg_mr(device.pd.get(), bytes.data(), bytes.size(), access), nullptr);
    EXPECT_EQ(errno, EINVAL);
  }
  reg_mr(device.pd.get(), bytes.data(), bytes.size(), IBV_ACCESS_REMOTE_READ);  // needs no other permission
  reg_mr(device.pd.get(), bytes.data(), bytes.size(), 0);                       // local reads are always allowed
}

TEST_F(MemoryRegion, UnknownAccessFlag_IsRefused_OptionalOneIsNot) {
  errno = 0;
  EXPECT_EQ(verbs().reg_mr(device.pd.get(), bytes.data(), bytes.size(), kAllAccess | (1 << 18)), nullptr);
  EXPECT_EQ(errno, EINVAL);
  // For flags of the optional range the header calls ibv_reg_mr_iova2; a device ignores optional flags that it does not
  // know.
  ibv_mr* const mr =
      verbs().reg_mr_iova2(device.pd.get(), bytes.data(), bytes.size(), reinterpret_cast<std::uintptr_t>(bytes.data()),
                           static_cast<unsigned>(kAllAccess) | IBV_ACCESS_RELAXED_ORDERING);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(verbs().dereg_mr(mr), 0);
}

// A device that supports memory windows or on-demand paging accepts the flag; softverbs does not.
TEST_F(MemoryRegion, UnsupportedAccessFlag_IsRefusedAsUnsupported) {
  for (const int flag : {int{IBV_ACCESS_MW_BIND}, int{IBV_ACCESS_ON_DEMAND}}) {
    SCOPED_TRACE(flag);
    errno = 0;
    const Mr mr(verbs().reg_mr(device.pd.get(), bytes.data(), bytes.size(), kAllAccess | flag));
    if (mr == nullptr) {
      EXPECT_EQ(errno, EOPNOTSUPP);
    }
    // The remaining flags are checked first.
    errno = 0;
    EXPECT_EQ(verbs().reg_mr(device.pd.get(), bytes.data(), bytes.size(), flag | IBV_ACCESS_REMOTE_WRITE), nullptr);
    EXPECT_EQ(errno, EINVAL);
  }
}

TEST_F(MemoryRegion, UnmappedMemory_IsRefused) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const hole = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(hole, MAP_FAILED);
  ASSERT_EQ(munmap(static_cast<std::byte*>(hole) + page, page), 0);
  errno = 0;
  EXPECT_EQ(verbs().reg_mr(device.pd.get(), hole, 2 * page, kAllAccess), nullptr);
  EXPECT_EQ(errno, EFAULT);
  reg_mr(device.pd.get(), hole, page);
  munmap(hole, page);
}

TEST_F(MemoryRegion, RangeThatWraps_IsRefused) {
  EXPECT_EQ(verbs().reg_mr(device.pd.get(), bytes.data(), ~std::size_t{0} - 100, kAllAccess), nullptr);
}

TEST_F(MemoryRegion, DeallocOfPdInUse_IsBusy) {
  Pd pd = alloc_pd(device);
  Mr mr = reg_mr(pd.get(), bytes.data(), bytes.size());
  EXPECT_EQ(verbs().dealloc_pd(pd.get()), EBUSY);
  mr.reset();
  {
    const Endpoint endpoint(device, {.pd = pd.get()});
    EXPECT_EQ(verbs().dealloc_pd(pd.get()), EBUSY);
  }
  {
    const Srq srq = create_srq(pd.get());
    EXPECT_EQ(verbs().dealloc_pd(pd.get()), EBUSY);
  }
  pd.reset();  // the deleter fails the test when the PD is still in use
}

TEST_F(MemoryRegion, RepeatedRegistration_Succeeds) {
  for (int i = 0; i < 2000; ++i) {
    const Pd pd = alloc_pd(device);
    const Mr mr = reg_mr(pd.get(), bytes.data(), bytes.size());
    ASSERT_NE(mr->lkey, 0U);
  }
}

TEST_F(MemoryRegion, DmabufWithoutSupport_IsRefused) {
  errno = 0;
  EXPECT_EQ(verbs().reg_dmabuf_mr(device.pd.get(), 0, bytes.size(), 0, -1, kAllAccess), nullptr);
  EXPECT_TRUE(errno == EOPNOTSUPP || errno == EBADF) << errno;  // EBADF from a device that supports dma-bufs
}

}  // namespace
}  // namespace verbatim::test
