// The first bytes of a context, which NCCL overwrites.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "conformance.h"
#include "process_resources.h"

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
    const long paths = verbs_paths();
    const long paths_of_class = verbs_paths(kTrafficClass);
    {
      TestConnection link = this->link({own, 0}, {own, 0});
      exchange_one(link, 100'000);
    }
    EXPECT_GE(verbs_paths(kTrafficClass) - paths_of_class, 2) << "one QP of each end";
    EXPECT_EQ(verbs_paths(kTrafficClass) - paths_of_class, verbs_paths() - paths) << "all QPs have this class";
    EXPECT_OK(net().finalize(own));
    EXPECT_EQ(verbs_alive(), "");
  }
}

}  // namespace
}  // namespace conformance
