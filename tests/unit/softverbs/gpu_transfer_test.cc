// GPU memory. The stand-in for libcuda takes the place of GPUs. The routes between processes differ in where memory
// lies, not in which threads meet. With ThreadSanitizer the rest is the longest test, so it has two halves there.
//: program softverbs_gpu_test sources=support/child.cc,gpu_fixture.cc,main.cc link=verbs_test
//: test softverbs-gpu-{} use=device MLX5_TEST_LIBRARY={softverbs_mlx5} CUDA_TEST_LIBRARY={standin_cuda}
//:   + SOFTVERBS_GPU_MEMORY=both
//:   when sanitizer=thread priority=5
//:   thread threads
//:   when sanitizer=thread shards=2 filter=-Route/*BetweenProcesses*
//:   inline full-sanitized SOFTVERBS_ENGINE=inline
//:   + filter=*Order*:*Transfers*:*Atomics*:*Registration*:*Failures*Deregistration*
//:   staged full-sanitized SOFTVERBS_GPU_COPY=staged filter=-*Settings*
//:   three-engines full SOFTVERBS_ENGINES=3 filter=*Order*:*Pipeline*:*QpEnds*:*Atomics*:*Failures*
//:   adaptive-routing full-sanitized SOFTVERBS_ORDERING=adaptive-routing
//:   + filter=*Order*:*Pipeline*:*Transfers*:*Sges*
//:   cross-memory-forbidden full SOFTVERBS_CROSS_MEMORY=forbidden filter=*Processes*:GpuLateOrder*Peer*

// RDMA operations between host memory, GPU memory and memory of another GPU, in one process and in two: exactly the
// right bytes arrive.
#include <gtest/gtest.h>

#include <numeric>

#include "gpu_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kTransferSizes[] = {0, 1, 77, 131'073, 1'200'003};
constexpr std::size_t kTransferMargin = 65;
constexpr std::size_t kTransferBytes = 1'200'003 + 2 * kTransferMargin;

struct Route {
  Place from;
  Place to;
};

std::string route_name(const testing::TestParamInfo<Route>& info) {
  return name_of(info.param.from) + "To" + name_of(info.param.to);
}

class GpuTransfers : public testing::TestWithParam<Route> {
 protected:
  std::vector<ibv_sge> part(const PlacedRegion& region, std::size_t length) const {
    if (length == 0) return {};
    return {region.sge(kTransferMargin, length)};
  }
  void expect_only(std::size_t size, std::uint64_t seed) const {
    EXPECT_EQ(pair.target.find_wrong_byte(kTransferMargin, size, seed), std::nullopt);
    EXPECT_EQ(pair.target.untouched_outside(kTransferMargin, size), "");
  }

  GpuPair pair{GetParam().from, GetParam().to, kTransferBytes};
};

INSTANTIATE_TEST_SUITE_P(Route, GpuTransfers,
                         testing::Values(Route{kHost, kLegacy0}, Route{kHost, kJoined1}, Route{kLegacy0, kHost},
                                         Route{kJoined1, kHost}, Route{kLegacy0, kLegacy0},
                                         Route{kLegacy0, kExportable1}, Route{kExportable1, kLegacy0},
                                         Route{kExportable1, kExportable1}, Route{kPrivate0, kJoined1},
                                         Route{kJoined1, kPrivate0}, Route{kJoined1, kJoined1}),
                         route_name);

TEST_P(GpuTransfers, Write_ChangesExactlyTheTarget) {
  for (const std::size_t size : kTransferSizes) {
    SCOPED_TRACE(size);
    pair.source.fill(kTransferMargin, size, size + 1);
    pair.target.poison();
    const SendOptions options = pair.target.target(1, kTransferMargin);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, part(pair.source, size), options), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    expect_only(size, size + 1);
  }
}

TEST_P(GpuTransfers, WriteWithImmediate_ArrivesWhole) {
  for (const std::size_t size : kTransferSizes) {
    SCOPED_TRACE(size);
    pair.source.fill(kTransferMargin, size, size + 2);
    pair.target.poison();
    ASSERT_EQ(post_recv(pair.b.qp(), {}, 5), 0);
    SendOptions options = pair.target.target(2, kTransferMargin);
    options.imm = 0xABCD;
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, part(pair.source, size), options), 0);
    const ibv_wc wc = poll_one(pair.b.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    EXPECT_EQ(wc.wr_id, 5U);
    EXPECT_EQ(wc.imm_data, 0xABCDU);
    EXPECT_EQ(wc.byte_len, size);
    expect_only(size, size + 2);
    EXPECT_EQ(poll_one(pair.a.send_cq()).wr_id, 2U);
  }
}

TEST_P(GpuTransfers, Send_ArrivesWhole) {
  for (const std::size_t size : kTransferSizes) {
    SCOPED_TRACE(size);
    pair.source.fill(kTransferMargin, size, size + 3);
    pair.target.poison();
    ASSERT_EQ(post_recv(pair.b.qp(), part(pair.target, size), 6), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, part(pair.source, size), {.wr_id = 3}), 0);
    const ibv_wc wc = poll_one(pair.b.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.byte_len, size);
    expect_only(size, size + 3);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  }
}

// The target's QP reads.
TEST_P(GpuTransfers, Read_FetchesTheSource) {
  for (const std::size_t size : kTransferSizes) {
    SCOPED_TRACE(size);
    pair.source.fill(kTransferMargin, size, size + 4);
    pair.target.poison();
    const SendOptions options = pair.source.target(4, kTransferMargin);
    ASSERT_EQ(post(pair.b.qp(), IBV_WR_RDMA_READ, part(pair.target, size), options), 0);
    EXPECT_EQ(poll_one(pair.b.send_cq()).status, IBV_WC_SUCCESS);
    expect_only(size, size + 4);
  }
}

// `from`: memory of this process; `to`: of the other one.
class GpuTransfersBetweenProcesses : public testing::TestWithParam<Route> {
 protected:
  std::vector<ibv_sge> part(std::size_t length) const {
    if (length == 0) return {};
    return {pair.region.sge(kTransferMargin, length)};
  }
  void expect_at_peer(std::size_t size, std::uint64_t seed) {
    EXPECT_EQ(pair.peer.find_wrong_byte(kTransferMargin, size, seed), std::nullopt);
    EXPECT_TRUE(pair.peer.untouched_outside(kTransferMargin, size));
  }
  void expect_here(std::size_t size, std::uint64_t seed) const {
    EXPECT_EQ(pair.region.find_wrong_byte(kTransferMargin, size, seed), std::nullopt);
    EXPECT_EQ(pair.region.untouched_outside(kTransferMargin, size), "");
  }

  GpuPeerPair pair{GetParam().from, GetParam().to, kTransferBytes};
};

INSTANTIATE_TEST_SUITE_P(Route, GpuTransfersBetweenProcesses,
                         testing::Values(Route{kHost, kLegacy0}, Route{kHost, kPrivate1}, Route{kLegacy0, kHost},
                                         Route{kPrivate0, kPrivate0}, Route{kLegacy0, kLegacy0},
                                         Route{kLegacy1, kLegacy0}, Route{kExportable0, kExportable1},
                                         Route{kExportable1, kPrivate0}, Route{kPrivate0, kExportable0},
                                         Route{kJoined1, kJoined1}),
                         route_name);

TEST_P(GpuTransfersBetweenProcesses, OperationsOfThisProcess_MoveExactlyTheirBytes) {
  for (const std::size_t size : kTransferSizes) {
    SCOPED_TRACE(size);
    pair.region.fill(kTransferMargin, size, size + 1);
    pair.peer.poison();
    SendOptions options = pair.peer.target(1, kTransferMargin);
    options.imm = 99;
    ASSERT_EQ(pair.peer.post_recv(0, 0, 7), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, part(size), options), 0);
    // First here: the inline engine of this process moves the bytes, while this process makes calls.
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    const ibv_wc wc = pair.peer.poll_received();
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.imm_data, 99U);
    EXPECT_EQ(wc.byte_len, size);
    expect_at_peer(size, size + 1);

    pair.region.fill(kTransferMargin, size, size + 2);
    pair.peer.poison();
    ASSERT_EQ(pair.peer.post_recv(kTransferMargin, size, 8), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, part(size)), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.peer.poll_received().status, IBV_WC_SUCCESS);
    expect_at_peer(size, size + 2);

    pair.peer.fill(kTransferMargin, size, size + 3);
    pair.region.poison();
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_READ, part(size), options), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    expect_here(size, size + 3);
  }
}

TEST_P(GpuTransfersBetweenProcesses, OperationsOfThePeer_MoveExactlyTheirBytes) {
  for (const std::size_t size : kTransferSizes) {
    SCOPED_TRACE(size);
    const SendOptions options = pair.region.target(1, kTransferMargin);
    pair.peer.fill(kTransferMargin, size, size + 4);
    pair.region.poison();
    ASSERT_EQ(pair.peer.post(IBV_WR_RDMA_WRITE, kTransferMargin, size, options), 0);
    EXPECT_EQ(pair.peer.poll_sent().status, IBV_WC_SUCCESS);
    expect_here(size, size + 4);

    pair.region.fill(kTransferMargin, size, size + 5);
    pair.peer.poison();
    ASSERT_EQ(pair.peer.post(IBV_WR_RDMA_READ, kTransferMargin, size, options), 0);
    EXPECT_EQ(pair.peer.poll_sent().status, IBV_WC_SUCCESS);
    expect_at_peer(size, size + 5);
  }
}

// SGEs of 1 byte to more than a step, in memory of every kind.
std::vector<std::size_t> uneven_lengths() {
  return {1, 70'001, 4096, 1'300'000};
}

TEST(GpuSges, MixedMemory_IsGatheredAndScattered) {
  const Device device = open_device();
  const std::vector<std::size_t> lengths = uneven_lengths();
  const std::size_t total = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
  const Place gathered[] = {kLegacy0, kHost, kPrivate1, kExportable0};
  const Place scattered[] = {kExportable1, kLegacy1, kHost, kJoined1};
  const PlacedRegion target(device.pd.get(), kLegacy1, total, 1);
  std::vector<std::unique_ptr<PlacedRegion>> sources;
  std::vector<std::unique_ptr<PlacedRegion>> sinks;
  std::vector<ibv_sge> source_sges;
  std::vector<ibv_sge> sink_sges;
  std::vector<std::byte> all(total);
  fill_pattern(all, 1);
  std::size_t offset = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    sources.push_back(std::make_unique<PlacedRegion>(device.pd.get(), gathered[i], lengths[i], i));
    sources.back()->write(0, std::span(all).subspan(offset, lengths[i]));
    source_sges.push_back(sources.back()->sge());
    // In another order, so that the borders differ.
    const std::size_t length = lengths[lengths.size() - 1 - i];
    sinks.push_back(std::make_unique<PlacedRegion>(device.pd.get(), scattered[i], length, 7));
    sink_sges.push_back(sinks.back()->sge());
    offset += lengths[i];
  }
  const auto expect_scattered = [&] {
    std::size_t begin = 0;
    for (const auto& sink : sinks) {
      EXPECT_EQ(find_wrong_byte(sink->read(0, sink->size()), 1, begin), std::nullopt) << begin;
      EXPECT_EQ(sink->untouched_outside(0, sink->size()), "");
      begin += sink->size();
      sink->poison();
    }
  };
  Endpoint a(device, gpu_endpoint());
  Endpoint b(device, gpu_endpoint());
  connect(a, b);
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, source_sges, target.target()), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(target.find_wrong_byte(0, total, 1), std::nullopt);
  ASSERT_EQ(post_recv(b.qp(), sink_sges), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, source_sges), 0);
  EXPECT_EQ(poll_one(b.recv_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  expect_scattered();
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_READ, sink_sges, target.target()), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  expect_scattered();
}

TEST(GpuInline, InlineData_ReachesGpuMemory) {
  const GpuPair pair(kHost, kExportable0, 4096);
  std::byte small[40];
  fill_pattern(small, 8);
  const ibv_sge sge{reinterpret_cast<std::uint64_t>(small), sizeof small, 0};
  SendOptions options = pair.target.target(1, 9);
  options.flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
  ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {sge}, options), 0);
  ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge(100, 40)}), 0);
  ASSERT_EQ(post(pair.a.qp(), IBV_WR_SEND, {sge}, {.flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED}), 0);
  std::fill(std::begin(small), std::end(small), std::byte{0});
  for (const ibv_wc& wc : poll(pair.a.send_cq(), 2)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(pair.target.find_wrong_byte(9, 40, 8), std::nullopt);
  EXPECT_EQ(pair.target.find_wrong_byte(100, 40, 8), std::nullopt);
}

TEST(GpuSrq, ReceivesInGpuMemory_AreFilledInOrder) {
  const Device device = open_device();
  const PlacedRegion source(device.pd.get(), kLegacy0, 4 * 10'000);
  const PlacedRegion target(device.pd.get(), kPrivate1, 4 * 10'000);
  const Srq srq = create_srq(device.pd.get());
  EndpointOptions options = gpu_endpoint();
  options.srq = srq.get();
  Endpoint a(device, gpu_endpoint());
  Endpoint b(device, options);
  connect(a, b);
  source.fill(4);
  for (std::size_t i = 0; i < 4; ++i) {
    ASSERT_EQ(post_srq_recv(srq.get(), {target.sge(i * 10'000, 10'000)}, i), 0);
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(i * 10'000, 10'000)}), 0);
  }
  const std::vector<ibv_wc> received = poll(b.recv_cq(), 4);
  ASSERT_EQ(received.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(received[i].wr_id, i);
  EXPECT_EQ(target.find_wrong_byte(0, target.size(), 4), std::nullopt);
  for (const ibv_wc& wc : poll(a.send_cq(), 4)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

TEST(GpuDevices, WriteFromOneDeviceToAnother_ArrivesWhole) {
  const Device first = open_device(0);
  const Device second = open_device(1);
  const PlacedRegion source(first.pd.get(), kExportable0, 300'000);
  const PlacedRegion target(second.pd.get(), kExportable1, 300'000);
  Endpoint a(first, gpu_endpoint());
  Endpoint b(second, gpu_endpoint());
  connect(a, b);
  for (std::uint64_t round = 1; round <= 4; ++round) {
    source.fill(round);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge()}, target.target()), 0);
    EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(target.find_wrong_byte(0, target.size(), round), std::nullopt);
  }
}

}  // namespace
}  // namespace verbatim::test
