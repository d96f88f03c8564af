//: in softverbs_gpu_test

// Atomics on GPU memory: the right results in every direction, and no increment is lost among the devices and processes
// that reach one address.
#include <gtest/gtest.h>

#include <cstring>

#include "gpu_fixture.h"
#include "support/wait.h"

namespace verbatim::test {
namespace {

constexpr std::uint64_t kStart = 0x1234'5678'9ABC'DEF0;

TEST(GpuAtomics, EveryDirection_ReturnsTheOldAndStoresTheNewValue) {
  const Device device = open_device();
  Endpoint a(device, gpu_endpoint());
  Endpoint b(device, gpu_endpoint());
  connect(a, b);
  for (const Place& result_place : {kHost, kLegacy0, kPrivate1}) {
    for (const Place& target_place : {kHost, kLegacy0, kExportable1}) {
      if (!result_place.is_gpu() && !target_place.is_gpu()) continue;
      SCOPED_TRACE(name_of(result_place) + " from " + name_of(target_place));
      const PlacedRegion result(device.pd.get(), result_place, 24);
      const PlacedRegion target(device.pd.get(), target_place, 24);
      target.write_word(8, kStart);
      const SendOptions word = target.target(0, 8);
      ASSERT_EQ(post_atomic(a.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, result.sge(8, 8), word, 5), 0);
      EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(result.read_word(8), kStart);
      EXPECT_EQ(target.read_word(8), kStart + 5);
      EXPECT_EQ(result.untouched_outside(8, 8), "");
      EXPECT_EQ(target.untouched_outside(8, 8), "");
      ASSERT_EQ(post_atomic(a.qp(), IBV_WR_ATOMIC_CMP_AND_SWP, result.sge(8, 8), word, kStart + 4, 1), 0);
      EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(result.read_word(8), kStart + 5);
      EXPECT_EQ(target.read_word(8), kStart + 5) << "the comparison failed";
      ASSERT_EQ(post_atomic(a.qp(), IBV_WR_ATOMIC_CMP_AND_SWP, result.sge(8, 8), word, kStart + 5, 77), 0);
      EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(result.read_word(8), kStart + 5);
      EXPECT_EQ(target.read_word(8), 77U);
    }
  }
}

TEST(GpuAtomics, ResultInSeveralSges_IsSplit) {
  const GpuPair pair(kLegacy0, kPrivate0, 64);
  pair.target.write_word(0, kStart);
  const ibv_sge sges[] = {pair.source.sge(1, 3), pair.source.sge(20, 5)};
  ibv_send_wr request{};
  request.sg_list = const_cast<ibv_sge*>(sges);
  request.num_sge = 2;
  request.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  request.send_flags = IBV_SEND_SIGNALED;
  // The payload of the target begins at an odd address.
  const std::uint64_t aligned = (pair.target.address() + 7) / 8 * 8;
  const std::size_t offset = aligned - pair.target.address();
  pair.target.write_word(offset, kStart);
  request.wr.atomic = {.remote_addr = aligned, .compare_add = 1, .swap = 0, .rkey = pair.target.mr->rkey};
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(pair.a.qp(), &request, &bad), 0);
  EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  std::vector<std::byte> found = pair.source.read(1, 3);
  const std::vector<std::byte> rest = pair.source.read(20, 5);
  found.insert(found.end(), rest.begin(), rest.end());
  EXPECT_EQ(std::memcmp(found.data(), &kStart, sizeof kStart), 0);
  EXPECT_EQ(pair.target.read_word(offset), kStart + 1);
}

TEST(GpuAtomics, UnalignedAndForbidden_AreRefused) {
  const Device device = open_device();
  const PlacedRegion result(device.pd.get(), kLegacy0, 8);
  const PlacedRegion target(device.pd.get(), kLegacy0, 64);
  const PlacedRegion without(device.pd.get(), kLegacy0, 64, 0, kAllAccess);
  const auto status = [&](const SendOptions& options) {
    Endpoint endpoint(device, gpu_endpoint());
    connect(endpoint, endpoint);
    EXPECT_EQ(post_atomic(endpoint.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, result.sge(), options, 1), 0);
    return poll_one(endpoint.send_cq()).status;
  };
  EXPECT_EQ(status(target.target(0, 4)), IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(status(target.target(0, 64)), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(status(without.target()), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(target.untouched_outside(0, 0), "");
}

TEST(GpuAtomics, SettingRefused_TargetInGpuMemoryFails) {
  check_in_new_process({{"SOFTVERBS_GPU_ATOMICS", "refused"}}, [] {
    const Device device = open_device();
    Endpoint a(device, gpu_endpoint());
    Endpoint b(device, gpu_endpoint());
    connect(a, b);
    const PlacedRegion in_gpu(device.pd.get(), kLegacy0, 8);
    const PlacedRegion in_host(device.pd.get(), kHost, 8);
    in_gpu.write_word(0, kStart);
    in_host.write_word(0, kStart);
    ASSERT_EQ(post_atomic(a.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, in_gpu.sge(), in_host.target(), 1), 0);
    EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);  // only the target counts
    EXPECT_EQ(in_host.read_word(0), kStart + 1);
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {in_host.sge()}, in_gpu.target()), 0);
    EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);  // only atomics are refused
    ASSERT_EQ(post_atomic(a.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, in_host.sge(), in_gpu.target(), 1), 0);
    EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_REM_OP_ERR);
    EXPECT_EQ(expect_async_event(device.context.get(), IBV_EVENT_QP_FATAL).qp, b.qp());
    EXPECT_EQ(in_gpu.read_word(0), kStart + 1);
  });
}

// Posts `count` additions of 1, one after the other.
void add(Endpoint& endpoint, const ibv_sge& result, const SendOptions& target, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    ASSERT_EQ(post_atomic(endpoint.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, result, target, 1), 0);
    ASSERT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  }
}

// Adds 1 to a word of GPU memory by this process through device 0, and by another one through `other_device`, `count`
// times each. Returns the word.
std::uint64_t sum_of_additions(unsigned other_device, std::uint64_t count) {
  const Device own = open_device(0);
  const Device other = open_device(other_device);
  const PlacedRegion target(own.pd.get(), kLegacy0, 64);
  const Mr target_of_other(reg_dmabuf(other.pd.get(), target.address(), 64));
  const PlacedRegion result(own.pd.get(), kHost, 8);
  target.write_word(0, 0);
  Endpoint loop(own, gpu_endpoint());
  Endpoint to_adder(other, gpu_endpoint());
  connect(loop, loop);
  Peer adder({.device = other_device, .memory = kHost, .access = kAtomicAccess});
  GpuPeerPair::connect_peer(to_adder, adder);
  adder.start_adding(count, {.remote_addr = target.address(), .rkey = target_of_other->rkey});
  add(loop, result.sge(), target.target(), count);
  adder.await_added();
  return target.read_word(0);
}

TEST(GpuAtomics, SettingDevice_ThoseOfOneDeviceExcludeEachOtherOnly) {
  check_in_new_process({{"SOFTVERBS_ATOMICS", "device"}}, [] {
    constexpr std::uint64_t kCount = 50;
    EXPECT_EQ(sum_of_additions(0, kCount), 2 * kCount);
    bool has_lost = false;  // as soon as both have run at the same time
    for (Wait patience(kPatience); !has_lost && !patience.is_over();) {
      has_lost = sum_of_additions(1, kCount) < 2 * kCount;
    }
    EXPECT_TRUE(has_lost);
  });
}

// One word of GPU memory is reached by two devices of this process, by a peer through this process's region, and
// through a region of another process that has mapped the memory.
TEST(GpuAtomics, TwoDevicesAndThreeProcesses_LoseNoIncrement) {
  constexpr std::uint64_t kCount = 60;
  const Device first = open_device(0);
  const Device second = open_device(1);
  const PlacedRegion target(first.pd.get(), kLegacy0, 64);
  const Mr second_mr(reg_dmabuf(second.pd.get(), target.address(), 64));
  ASSERT_NE(second_mr, nullptr);
  const PlacedRegion results(first.pd.get(), kHost, 64);
  const PlacedRegion second_results(second.pd.get(), kPrivate1, 64);
  target.write_word(0, 0);
  CUipcMemHandle handle{};
  const std::uint64_t start = target.gpu_buffer().start();
  ASSERT_EQ(cuda().cuIpcGetMemHandle(&handle, start), CUDA_SUCCESS);
  Place imported{MemoryKind::kImported, 0};
  std::copy(std::begin(handle.reserved), std::end(handle.reserved), imported.ipc_handle.begin());

  Peer adder({.memory = kHost, .access = kAtomicAccess});
  Peer importer({.region_bytes = target.address() - start + 64, .memory = imported, .access = kAtomicAccess});
  Endpoint a(first, gpu_endpoint());
  Endpoint b(second, gpu_endpoint());
  Endpoint to_adder(first, gpu_endpoint());
  Endpoint to_importer(first, gpu_endpoint());
  connect(a, a);
  connect(b, b);
  GpuPeerPair::connect_peer(to_adder, adder);
  GpuPeerPair::connect_peer(to_importer, importer);

  adder.start_adding(kCount, target.target());
  std::thread by_second(
      [&] { add(b, second_results.sge(0, 8), {.remote_addr = target.address(), .rkey = second_mr->rkey}, kCount); });
  std::thread by_importer(
      [&] { add(to_importer, results.sge(16, 8), importer.target(0, target.address() - start), kCount); });
  add(a, results.sge(0, 8), target.target(), kCount);
  by_second.join();
  by_importer.join();
  adder.await_added();
  EXPECT_EQ(target.read_word(0), 4 * kCount);
}

TEST(GpuAtomics, MemoryOfThePeer_IsIncrementedByBothProcesses) {
  for (const Place& place : {kPrivate0, kExportable1}) {
    SCOPED_TRACE(name_of(place));
    constexpr std::uint64_t kCount = 40;
    GpuPeerPair pair(kLegacy0, kHost, 4096);
    const PlacedRegion target(pair.device.pd.get(), place, 64);
    target.write_word(0, 0);
    Endpoint own(pair.device, gpu_endpoint());
    connect(own, own);
    pair.peer.start_adding(kCount, target.target());
    add(own, pair.region.sge(8, 8), target.target(), kCount);
    pair.peer.await_added();
    EXPECT_EQ(target.read_word(0), 2 * kCount);
  }
}

}  // namespace
}  // namespace verbatim::test
