//: in softverbs_gpu_test

// Beside kernels that spin until data arrives, as NCCL's do, no call on the data path may wait for CUDA. The stand-in
// counts the calls that wait for a kernel, and the copies of memory that is not pinned.
#include <gtest/gtest.h>

#include "gpu_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kKernelBytes = 300'000;

class GpuKernels : public testing::Test {
 protected:
  void SetUp() override { VERBATIM_NEEDS_STANDIN(); }

  static void write(const GpuPair& pair, std::uint64_t seed) {
    pair.source.fill(seed);
    ASSERT_EQ(post_recv(pair.b.qp(), {}), 0);
    ASSERT_EQ(pair.post_write(0, kKernelBytes, 1, IBV_WR_RDMA_WRITE_WITH_IMM), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.target.find_wrong_byte(0, kKernelBytes, seed), std::nullopt);
  }
  static void send_and_read(const GpuPair& pair, std::uint64_t seed) {
    pair.source.fill(seed);
    ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {pair.source.sge()}), 0);
    EXPECT_EQ(poll_one(pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.target.find_wrong_byte(0, kKernelBytes, seed), std::nullopt);
    pair.target.fill(seed + 1);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_READ, {pair.source.sge()}, pair.target.target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.source.find_wrong_byte(0, kKernelBytes, seed + 1), std::nullopt);
  }
  // At most one thread of a process, which maps the memory of others, waits for the kernels.
  static constexpr std::uint64_t kMappingThreads = 1;
};

TEST_F(GpuKernels, OperationsInOneProcess_GoOn) {
  for (const auto& [from, to] : {std::pair{kHost, kLegacy0}, std::pair{kLegacy0, kHost}, std::pair{kLegacy0, kLegacy0},
                                 std::pair{kLegacy0, kExportable1}, std::pair{kPrivate1, kPrivate0}}) {
    SCOPED_TRACE(name_of(from) + " to " + name_of(to));
    const GpuPair pair(from, to, kKernelBytes);
    write(pair, 1);  // the memory of the other GPU is mapped now, or soon
    std::this_thread::sleep_for(20ms);
    SpinningKernels kernels;
    for (std::uint64_t seed = 2; seed < 6; ++seed) write(pair, seed);
    send_and_read(pair, 10);
    const std::uint64_t aligned = (pair.target.address() + 7) / 8 * 8;
    ASSERT_EQ(post_atomic(pair.a.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, pair.source.sge(0, 8),
                          {.remote_addr = aligned, .rkey = pair.target.mr->rkey}, 1),
              0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_LE(kernels.waits(), kMappingThreads);
  }
}

// Also the first operation after the registration, when nothing is mapped yet.
TEST_F(GpuKernels, FirstOperations_GoOn) {
  for (const auto& [from, to] :
       {std::pair{kLegacy0, kLegacy1}, std::pair{kExportable0, kExportable1}, std::pair{kHost, kJoined1}}) {
    SCOPED_TRACE(name_of(from) + " to " + name_of(to));
    const GpuPair pair(from, to, kKernelBytes);
    SpinningKernels kernels;
    write(pair, 1);
    send_and_read(pair, 2);
    EXPECT_LE(kernels.waits(), kMappingThreads);
  }
}

TEST_F(GpuKernels, QpsAndDeregistration_DoNotWait) {
  auto pair = std::make_unique<GpuPair>(kLegacy0, kExportable1, kKernelBytes);
  write(*pair, 1);
  SpinningKernels kernels;
  Endpoint a(pair->device, gpu_endpoint());
  Endpoint b(pair->device, gpu_endpoint());
  connect(a, b);
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {pair->source.sge()}, pair->target.target()), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  a.destroy();
  b.destroy();
  pair->source.mr.reset();
  pair->target.mr.reset();
  EXPECT_LE(kernels.waits(), kMappingThreads);
  kernels.end();
}

TEST_F(GpuKernels, OperationsBetweenProcesses_GoOn) {
  for (const auto& [own, peers] : {std::pair{kHost, kLegacy0}, std::pair{kLegacy0, kLegacy0},
                                   std::pair{kExportable0, kExportable1}, std::pair{kPrivate0, kPrivate1}}) {
    for (const bool is_mapped : {false, true}) {
      SCOPED_TRACE(name_of(own) + " to " + name_of(peers) + (is_mapped ? ", mapped before" : ", the first WRITE"));
      GpuPeerPair pair(own, peers, kKernelBytes);
      const auto exchange = [&](std::uint64_t seed) {
        pair.region.fill(seed);
        ASSERT_EQ(pair.peer.post_recv(0, 0, 1), 0);
        ASSERT_EQ(pair.post_write(0, kKernelBytes, 1, IBV_WR_RDMA_WRITE_WITH_IMM), 0);
        EXPECT_EQ(pair.peer.poll_received().status, IBV_WC_SUCCESS);
        EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
        EXPECT_EQ(pair.peer.find_wrong_byte(0, kKernelBytes, seed), std::nullopt);
        pair.peer.fill(0, kKernelBytes, seed + 100);
        ASSERT_EQ(pair.peer.post(IBV_WR_RDMA_WRITE, 0, kKernelBytes, pair.region.target()), 0);
        EXPECT_EQ(pair.peer.poll_sent().status, IBV_WC_SUCCESS);
        EXPECT_EQ(pair.region.find_wrong_byte(0, kKernelBytes, seed + 100), std::nullopt);
        ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_READ, {pair.region.sge()}, pair.peer.target(1)), 0);
        EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
      };
      if (is_mapped) {
        exchange(1);
        std::this_thread::sleep_for(20ms);
        exchange(2);
      }
      SpinningKernels kernels(&pair.peer);
      exchange(3);
      exchange(4);
      EXPECT_LE(kernels.waits(), kMappingThreads);
      EXPECT_LE(kernels.waits_of_peer(), kMappingThreads);
    }
  }
}

// Where the memory can be mapped, copies need no help of the process that owns it, as soon as it is mapped.
TEST_F(GpuKernels, MappableMemory_IsCopiedDirectlyAfterTheKernels) {
  const bool is_direct = !is_setting("SOFTVERBS_GPU_COPY", "staged");
  for (const Place& place : {kLegacy1, kExportable0, kPrivate0}) {
    SCOPED_TRACE(name_of(place));
    GpuPeerPair pair(kLegacy0, place, kKernelBytes);
    const auto copies_of_peer = [&] {
      const std::uint64_t before = pair.peer.standin(Peer::Standin::kCopies);
      EXPECT_EQ(pair.post_write(0, kKernelBytes), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
      return pair.peer.standin(Peer::Standin::kCopies) - before;
    };
    {
      const SpinningKernels kernels(&pair.peer);
      EXPECT_GT(copies_of_peer(), 0U) << "the memory cannot be mapped now";
    }
    std::uint64_t copies = 0;
    const auto end = std::chrono::steady_clock::now() + (is_direct && place.kind != MemoryKind::kPrivate ? 5s : 50ms);
    while ((copies = copies_of_peer()) != 0 && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(copies == 0, is_direct && place.kind != MemoryKind::kPrivate);
  }
}

}  // namespace
}  // namespace verbatim::test
