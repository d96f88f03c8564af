//: in softverbs_gpu_test

// Which streams of a GPU the QPs of a process use: a stream executes one copy after the other, so two programs are only
// compared fairly where the QPs of both use as many streams.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "gpu_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kCopyingQps = 8;
constexpr std::size_t kBytesOfAQp = 20'000;

// The number of QPs that are made between two that copy.
class GpuStreams : public testing::TestWithParam<std::size_t> {
 protected:
  void SetUp() override { VERBATIM_NEEDS_STANDIN(); }
};

INSTANTIATE_TEST_SUITE_P(OtherQps, GpuStreams, testing::Values(0, 1, 3, 7));

TEST_P(GpuStreams, EachOfEightQpsHasItsOwn) {
  check_in_new_process({}, [] {
    const Device device = open_device();
    const PlacedRegion source(device.pd.get(), kLegacy0, kBytesOfAQp, 3);
    const PlacedRegion target(device.pd.get(), kLegacy0, kBytesOfAQp, 13);
    std::vector<std::unique_ptr<Endpoint>> others;
    std::vector<std::unique_ptr<Endpoint>> ends;
    for (std::size_t i = 0; i < kCopyingQps; ++i) {
      for (const char* const end : {"sends", "receives"}) {
        SCOPED_TRACE(end);
        ends.push_back(std::make_unique<Endpoint>(device, gpu_endpoint()));
        for (std::size_t other = 0; other < GetParam(); ++other) others.push_back(std::make_unique<Endpoint>(device));
      }
      connect(*ends[2 * i], *ends[2 * i + 1]);
    }
    const unsigned long long before = cuda().standin_cuda_copy_streams();
    for (std::size_t i = 0; i < kCopyingQps; ++i) {
      ASSERT_EQ(post(ends[2 * i]->qp(), IBV_WR_RDMA_WRITE, {source.sge(0, kBytesOfAQp)}, target.target(i, 0)), 0);
      ASSERT_EQ(poll_one(ends[2 * i]->send_cq()).status, IBV_WC_SUCCESS);
    }
    EXPECT_EQ(cuda().standin_cuda_copy_streams() - before, kCopyingQps);
  });
}

}  // namespace
}  // namespace verbatim::test
