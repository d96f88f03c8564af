// The first bytes of a context, which NCCL overwrites; and what the plugin sets of its QPs.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "conformance.h"
#include "process_resources.h"
#include "support/counted_verbs/modifications.h"

namespace conformance {
namespace {

class OverwrittenContext : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Net, OverwrittenContext, ::testing::Values(11, 12), version_name);

// NCCL 2.29 and 2.30 treat a net plugin's context as one of their RMA proxy and overwrite its first four bytes.
TEST_P(OverwrittenContext, FirstFourBytesOverwritten_KeepsTrafficClass) {
  constexpr std::uint8_t kTrafficClass = 104;
  for (const std::int32_t written : {0x7fffffff, 0, -1}) {
    SCOPED_TRACE(written);
    void* own = nullptr;
    ASSERT_OK(net().init(1, {.traffic_class = kTrafficClass}, &own));
    ASSERT_NE(own, nullptr);
    std::memcpy(own, &written, sizeof written);
    const verbatim::test::Modifications modifications;
    {
      TestConnection link = this->link({own, 0}, {own, 0});
      exchange_one(link, 100'000);
    }
    const std::vector<ibv_qp_attr> paths = modifications.that_set(IBV_QP_AV);
    EXPECT_GE(paths.size(), 2U) << "one QP of each end";
    for (const ibv_qp_attr& path : paths) EXPECT_EQ(path.ah_attr.grh.traffic_class, kTrafficClass);
    EXPECT_OK(net().finalize(own));
    EXPECT_EQ(verbs_alive(), "");
  }
}

class FirstPsns : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Net, FirstPsns, ::testing::Values(12), version_name);

// Two random numbers of 24 bits are equal in one of 16 million runs.
TEST_P(FirstPsns, TwoConnections_BeginWithDifferentPsns) {
  void* context = nullptr;
  ASSERT_OK(net().init(1, {}, &context));
  std::set<std::uint32_t> psns;
  for (int connection = 0; connection < 2; ++connection) {
    const verbatim::test::Modifications modifications;
    TestConnection link = this->link({context, 0}, {context, 0});
    exchange_one(link, 100'000);
    EXPECT_EQ(modifications.expected_psns(), modifications.first_psns());
    EXPECT_EQ(modifications.first_psns().size(), 1U) << "the same at both ends";
    psns.merge(modifications.first_psns());
  }
  EXPECT_EQ(psns.size(), 2U);
  EXPECT_OK(net().finalize(context));
}

}  // namespace
}  // namespace conformance
