//: in softverbs_gpu_test

// Registration of GPU memory: by dma-buf and plainly, what is refused, keys and bounds, memory that comes and goes.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <fstream>

#include "base/unique_fd.h"
#include "gpu_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kRegionBytes = 100'000;

void* pointer_to(std::uint64_t address) {
  return reinterpret_cast<void*>(address);
}

class GpuRegistration : public testing::Test {
 protected:
  // nullptr: refused with `error`.
  Mr register_dmabuf(std::uint64_t iova, std::size_t length, int fd, int access = kAtomicAccess) {
    errno = 0;
    Mr mr(verbs().reg_dmabuf_mr(device.pd.get(), 0, length, iova, fd, access));
    error = errno;
    return mr;
  }
  Mr register_plainly(std::uint64_t address, std::size_t length, int access = kAtomicAccess) {
    errno = 0;
    Mr mr(verbs().reg_mr(device.pd.get(), pointer_to(address), length, access));
    error = errno;
    return mr;
  }
  ibv_wc_status write_to(const SendOptions& target, std::size_t length) {
    Endpoint endpoint(device, gpu_endpoint());
    connect(endpoint, endpoint);
    EXPECT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {local.sge(0, length)}, target), 0);
    return poll_one(endpoint.send_cq()).status;
  }

  Device device = open_device();
  PlacedRegion local{device.pd.get(), kHost, kRegionBytes};
  int error = 0;
};

TEST_F(GpuRegistration, Region_DescribesTheMemory) {
  for (const Place& place : {kLegacy0, kExportable1, kPrivate0, kJoined1}) {
    SCOPED_TRACE(name_of(place));
    const PlacedRegion region(device.pd.get(), place, kRegionBytes, 5);
    EXPECT_EQ(region.mr->addr, pointer_to(region.address()));
    EXPECT_EQ(region.mr->length, kRegionBytes);
    EXPECT_NE(region.mr->lkey, region.mr->rkey);
  }
}

// NCCL and Verbatim find out in this way whether dma-bufs can be registered.
TEST_F(GpuRegistration, InvalidDescriptor_IsEbadf) {
  const GpuBuffer memory(kLegacy0, kRegionBytes, 0);
  EXPECT_EQ(register_dmabuf(0, 4096, -1), nullptr);
  EXPECT_EQ(error, EBADF);
  EXPECT_EQ(register_dmabuf(memory.address(), kRegionBytes, -1), nullptr);
  EXPECT_EQ(error, EBADF);
  const int closed = dmabuf_of(memory.address(), kRegionBytes);
  close(closed);
  EXPECT_EQ(register_dmabuf(memory.address(), kRegionBytes, closed), nullptr);
  EXPECT_EQ(error, EBADF);
}

TEST_F(GpuRegistration, InvalidRange_IsRefused) {
  const GpuBuffer memory(kExportable0, kRegionBytes, 0);
  const UniqueFd fd(dmabuf_of(memory.address(), kRegionBytes));
  constexpr std::size_t kBeyond = 64 << 20;
  EXPECT_EQ(register_dmabuf(local.address(), kRegionBytes, fd.get()), nullptr) << "host memory";
  EXPECT_EQ(error, EINVAL);
  EXPECT_EQ(register_dmabuf(memory.address(), kBeyond, fd.get()), nullptr);
  EXPECT_EQ(error, EFAULT);
  EXPECT_EQ(register_dmabuf(memory.address(), 0, fd.get()), nullptr);
  EXPECT_EQ(error, EINVAL);
  EXPECT_EQ(register_dmabuf(memory.address(), ~std::size_t{0}, fd.get()), nullptr);
  EXPECT_EQ(error, EINVAL);
  EXPECT_EQ(register_dmabuf(memory.address(), kRegionBytes, fd.get(), IBV_ACCESS_REMOTE_WRITE), nullptr);
  EXPECT_EQ(error, EINVAL) << "without LOCAL_WRITE";
  EXPECT_EQ(register_plainly(memory.address(), kBeyond), nullptr);
  EXPECT_EQ(error, EFAULT);
  EXPECT_EQ(register_plainly(memory.address(), 0), nullptr);
  EXPECT_EQ(error, EINVAL);
}

TEST_F(GpuRegistration, FreedMemory_IsRefused) {
  GpuBuffer memory(kPrivate0, kRegionBytes, 0);
  const std::uint64_t address = memory.address();
  const UniqueFd fd(dmabuf_of(address, kRegionBytes));
  memory.free();
  EXPECT_EQ(register_dmabuf(address, kRegionBytes, fd.get()), nullptr);
  EXPECT_EQ(error, EINVAL);
  EXPECT_EQ(register_plainly(address, kRegionBytes), nullptr);
  EXPECT_EQ(error, EFAULT);
}

TEST_F(GpuRegistration, PlainAndDmabuf_AreTheSameMemory) {
  for (const Place& place : {kLegacy0, kExportable1, kPrivate0}) {
    SCOPED_TRACE(name_of(place));
    PlacedRegion region(device.pd.get(), place, kRegionBytes);
    Mr plain = register_plainly(region.address(), kRegionBytes);
    ASSERT_NE(plain, nullptr);
    Peer peer({.region_bytes = kRegionBytes, .memory = kLegacy0, .access = kAtomicAccess});
    Endpoint endpoint(device, gpu_endpoint());
    GpuPeerPair::connect_peer(endpoint, peer);
    const auto write_from_peer = [&](std::uint32_t rkey, std::uint64_t seed) {
      peer.fill(0, kRegionBytes, seed);
      ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, kRegionBytes, {.remote_addr = region.address(), .rkey = rkey}), 0);
      EXPECT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
      EXPECT_EQ(region.find_wrong_byte(0, kRegionBytes, seed), std::nullopt);
    };
    write_from_peer(region.mr->rkey, 1);
    write_from_peer(plain->rkey, 2);
    region.mr.reset();
    write_from_peer(plain->rkey, 3);
    plain = register_plainly(region.address(), kRegionBytes);
    write_from_peer(plain->rkey, 4);
  }
}

TEST_F(GpuRegistration, OverlappingAndAdjacentRegions_HaveTheirOwnBounds) {
  const GpuBuffer memory(kExportable0, 3 * kRegionBytes, 0);
  const auto part = [&](std::size_t first, std::size_t length) {
    return Mr(reg_dmabuf(device.pd.get(), memory.address() + first, length));
  };
  const Mr left = part(0, kRegionBytes);
  const Mr right = part(kRegionBytes, kRegionBytes);
  const Mr middle = part(kRegionBytes / 2, kRegionBytes);
  ASSERT_TRUE(left && right && middle);
  const auto at = [&](const Mr& mr, std::size_t offset) {
    return SendOptions{.remote_addr = memory.address() + offset, .rkey = mr->rkey};
  };
  local.fill(6);
  EXPECT_EQ(write_to(at(middle, kRegionBytes - 500), 1000), IBV_WC_SUCCESS) << "across the border of the others";
  EXPECT_EQ(memory.read(kRegionBytes - 500, 1000), local.read(0, 1000));
  EXPECT_EQ(memory.untouched_outside(kRegionBytes - 500, 1000), "");
  EXPECT_EQ(write_to(at(left, kRegionBytes - 500), 1000), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(write_to(at(right, kRegionBytes - 1), 2), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(write_to(at(middle, kRegionBytes / 2 - 1), 1), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(write_to(at(middle, kRegionBytes + kRegionBytes / 2), 1), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(memory.untouched_outside(kRegionBytes - 500, 1000), "");
}

TEST_F(GpuRegistration, KeysAndAccess_AreChecked) {
  PlacedRegion region(device.pd.get(), kLegacy0, kRegionBytes);
  const SendOptions good = region.target();
  SendOptions bad = good;
  bad.rkey = region.mr->lkey;
  EXPECT_EQ(write_to(bad, 64), IBV_WC_REM_ACCESS_ERR) << "the local key";
  bad = good;
  bad.remote_addr = region.address(kRegionBytes - 63);
  EXPECT_EQ(write_to(bad, 64), IBV_WC_REM_ACCESS_ERR) << "beyond the end";
  bad.remote_addr = region.address() - 1;
  EXPECT_EQ(write_to(bad, 64), IBV_WC_REM_ACCESS_ERR) << "before the begin";
  const Pd other_pd = alloc_pd(device);
  const PlacedRegion foreign(other_pd.get(), kLegacy0, kRegionBytes);
  EXPECT_EQ(write_to(foreign.target(), 64), IBV_WC_REM_ACCESS_ERR) << "another protection domain";
  const PlacedRegion read_only(device.pd.get(), kPrivate1, kRegionBytes, 0, IBV_ACCESS_REMOTE_READ);
  EXPECT_EQ(write_to(read_only.target(), 64), IBV_WC_REM_ACCESS_ERR) << "without REMOTE_WRITE";
  EXPECT_EQ(read_only.untouched_outside(0, 0), "");

  Endpoint a(device, gpu_endpoint());
  Endpoint b(device, gpu_endpoint());
  connect(a, b);
  ASSERT_EQ(post_recv(b.qp(), {read_only.sge(0, 64)}), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {local.sge(0, 64)}), 0);
  EXPECT_EQ(poll_one(b.recv_cq()).status, IBV_WC_LOC_PROT_ERR) << "a receive without LOCAL_WRITE";
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_REM_OP_ERR);

  EXPECT_EQ(write_to(good, 64), IBV_WC_SUCCESS);
  region.mr.reset();
  EXPECT_EQ(write_to(good, 64), IBV_WC_REM_ACCESS_ERR) << "deregistered";
}

TEST_F(GpuRegistration, OwnIova_TranslatesToTheMemory) {
  const GpuBuffer memory(kExportable1, kRegionBytes, 0);
  constexpr std::uint64_t kIova = 0x1234'5000;
  const Mr mr(verbs().reg_mr_iova(device.pd.get(), pointer_to(memory.address()), kRegionBytes, kIova, kAtomicAccess));
  ASSERT_NE(mr, nullptr);
  local.fill(7);
  EXPECT_EQ(write_to({.remote_addr = kIova + 77, .rkey = mr->rkey}, 5000), IBV_WC_SUCCESS);
  EXPECT_EQ(memory.read(77, 5000), local.read(0, 5000));
  EXPECT_EQ(memory.untouched_outside(77, 5000), "");
}

// Applications free memory and get the same address for other memory, perhaps on another GPU.
TEST_F(GpuRegistration, AddressUsedAgain_IsTheNewMemory) {
  Peer peer({.region_bytes = kRegionBytes, .memory = kLegacy0, .access = kAtomicAccess});
  Endpoint endpoint(device, gpu_endpoint());
  GpuPeerPair::connect_peer(endpoint, peer);
  Endpoint own(device, gpu_endpoint());
  connect(own, own);
  std::uint64_t address = 0;
  std::uint64_t seed = 10;
  const Place places[] = {kExportable0, kExportable1, kPrivate0, kExportable0, kLegacy0, kLegacy1, kPrivate1};
  for (const Place& place : places) {
    SCOPED_TRACE(name_of(place));
    PlacedRegion region(device.pd.get(), place, kRegionBytes);
    if (address == region.address()) RecordProperty("same_address", "yes");
    address = region.address();
    // Several WRITEs, because mappings in other processes are made while the first ones are executed.
    for (unsigned i = 0; i < 3; ++i, ++seed) {
      peer.fill(0, kRegionBytes, seed);
      ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, kRegionBytes, region.target()), 0);
      ASSERT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
      ASSERT_EQ(region.find_wrong_byte(0, kRegionBytes, seed), std::nullopt);
      EXPECT_EQ(region.untouched_outside(0, kRegionBytes), "");
      local.fill(++seed);
      ASSERT_EQ(post(own.qp(), IBV_WR_RDMA_WRITE, {local.sge()}, region.target()), 0);
      EXPECT_EQ(poll_one(own.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(region.find_wrong_byte(0, kRegionBytes, seed), std::nullopt);
      usleep(2000);
    }
    region.release();
  }
}

// The peer's memory is freed and allocated again while this process has it mapped.
TEST_F(GpuRegistration, ManyAllocations_AreMappedAndGivenUp) {
  PlacedRegion region(device.pd.get(), kExportable0, kRegionBytes);
  for (std::uint64_t round = 0; round < 4; ++round) {
    Peer peer(
        {.region_bytes = kRegionBytes, .memory = round % 2 == 0 ? kExportable1 : kLegacy0, .access = kAtomicAccess});
    Endpoint endpoint(device, gpu_endpoint());
    GpuPeerPair::connect_peer(endpoint, peer);
    for (std::uint64_t i = 0; i < 3; ++i) {
      region.fill(round * 10 + i);
      ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {region.sge()}, peer.target(i)), 0);
      EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(peer.find_wrong_byte(0, kRegionBytes, round * 10 + i), std::nullopt);
      usleep(1000);
    }
  }
}

// The thread that maps memory still looks at some regions when others are exported in their place.
TEST_F(GpuRegistration, OthersInTheirPlace_AreMappedAsThemselves) {
  constexpr std::size_t kRegions = 8;
  constexpr std::size_t kBytes = 64;
  const PlacedRegion source(device.pd.get(), kLegacy0, kBytes);
  Endpoint endpoint(device, gpu_endpoint());
  connect(endpoint, endpoint);
  std::deque<PlacedRegion> targets;
  const auto add_target = [&] { targets.emplace_back(device.pd.get(), kExportable1, kBytes); };
  while (targets.size() < kRegions) add_target();
  for (std::uint64_t round = 0; round < 100; ++round) {
    source.fill(round);
    for (const PlacedRegion& target : targets) {
      ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {source.sge()}, target.target()), 0);
      ASSERT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
      ASSERT_EQ(target.find_wrong_byte(0, kBytes, round), std::nullopt);
    }
    for (std::size_t i = 0; i < kRegions; ++i) {
      targets.pop_front();
      add_target();
    }
  }
}

TEST_F(GpuRegistration, WhileDataFlows_AllBytesArrive) {
  const GpuPair pair(kLegacy0, kExportable1, kRegionBytes);
  std::atomic<bool> ends{false};
  std::thread registering([&] {
    for (unsigned i = 0; !ends; ++i) {
      PlacedRegion region(pair.device.pd.get(), i % 2 == 0 ? kExportable0 : kPrivate1, 5000);
      region.release();
    }
  });
  for (std::uint64_t round = 1; round <= 30; ++round) {
    pair.source.fill(round);
    ASSERT_EQ(pair.post_write(0, kRegionBytes), 0);
    ASSERT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    ASSERT_EQ(pair.target.find_wrong_byte(0, kRegionBytes, round), std::nullopt);
  }
  ends = true;
  registering.join();
}

bool has_libcuda() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("libcuda") != std::string::npos) return true;
  }
  return false;
}

ibv_mr* try_dmabuf(const Device& device, std::uint64_t address, int fd) {
  errno = 0;
  return verbs().reg_dmabuf_mr(device.pd.get(), 0, 4096, address, fd, kAtomicAccess);
}

TEST(GpuSettings, WithoutCuda_DmabufIsNotSupported) {
  check_in_new_process({}, [] {
    const Device device = open_device();
    EXPECT_EQ(try_dmabuf(device, 0, -1), nullptr);
    EXPECT_EQ(errno, EOPNOTSUPP);
    const Region source(device.pd.get(), 4096);
    const Region target(device.pd.get(), 4096);
    Endpoint endpoint(device);
    connect(endpoint, endpoint);
    source.fill(1);
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {source.sge()},
                   {.remote_addr = target.address(), .rkey = target.mr->rkey}),
              0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_FALSE(has_libcuda());
    // The program may load CUDA later.
    const PlacedRegion region(device.pd.get(), kLegacy0, 4096);
    EXPECT_NE(region.mr, nullptr);
  });
}

TEST(GpuContexts, FirstRegistrationInThreadWithoutContext_Succeeds) {
  check_in_new_process({}, [] {
    const Device device = open_device();
    const GpuBuffer memory(kLegacy1, 4096, 0);
    const UniqueFd fd(dmabuf_of(memory.address(), 4096));
    Mr mr;
    std::thread([&] { mr.reset(try_dmabuf(device, memory.address(), fd.get())); }).join();
    EXPECT_NE(mr, nullptr);
  });
}

TEST(GpuContexts, ContextOfTheProgram_StaysCurrent) {
  const GpuPair pair(kLegacy0, kPrivate0, 5000);
  for (const bool has_context : {true, false}) {
    use_gpu(1 % gpu_count());
    if (!has_context) cuda().cuCtxSetCurrent(nullptr);
    CUcontext before = nullptr;
    CUcontext after = nullptr;
    ASSERT_EQ(cuda().cuCtxGetCurrent(&before), CUDA_SUCCESS);
    EXPECT_EQ(before != nullptr, has_context);
    const Mr mr(verbs().reg_mr(pair.device.pd.get(), pointer_to(pair.target.address()), 5000, kAtomicAccess));
    ASSERT_NE(mr, nullptr);
    ASSERT_EQ(pair.post_write(0, 5000), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    ASSERT_EQ(cuda().cuCtxGetCurrent(&after), CUDA_SUCCESS);
    EXPECT_EQ(after, before);
  }
}

TEST(GpuSettings, None_GpuMemoryIsRefused) {
  check_in_new_process({{"SOFTVERBS_GPU_MEMORY", "none"}}, [] {
    const Device device = open_device();
    const GpuBuffer memory(kLegacy0, 4096, 0);
    const UniqueFd fd(dmabuf_of(memory.address(), 4096));
    EXPECT_EQ(try_dmabuf(device, memory.address(), fd.get()), nullptr);
    EXPECT_EQ(errno, EOPNOTSUPP);
    EXPECT_EQ(verbs().reg_mr(device.pd.get(), pointer_to(memory.address()), 4096, kAtomicAccess), nullptr);
    EXPECT_EQ(errno, EFAULT);
  });
}

TEST(GpuSettings, Default_IsDmabufOnly) {
  check_in_new_process({{"SOFTVERBS_GPU_MEMORY", "dmabuf"}}, [] {
    const Device device = open_device();
    const PlacedRegion region(device.pd.get(), kLegacy0, 4096);
    EXPECT_EQ(verbs().reg_mr(device.pd.get(), pointer_to(region.address()), 4096, kAtomicAccess), nullptr);
    EXPECT_EQ(errno, EFAULT);
  });
}

TEST(GpuSettings, PeerMemory_IsPlainOnly) {
  check_in_new_process({{"SOFTVERBS_GPU_MEMORY", "peer-memory"}}, [] {
    Place plain = kLegacy0;
    plain.registration = Registration::kPlain;
    const GpuPair pair(kHost, plain, 5000);
    const UniqueFd fd(dmabuf_of(pair.target.address(), 4096));
    EXPECT_EQ(try_dmabuf(pair.device, pair.target.address(), fd.get()), nullptr);
    EXPECT_EQ(errno, EOPNOTSUPP);
    pair.source.fill(3);
    ASSERT_EQ(pair.post_write(0, 5000), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.target.find_wrong_byte(0, 5000, 3), std::nullopt);
  });
}

TEST(GpuSettings, MappableDescriptors_AreStillAccepted) {
  check_in_new_process({{"SOFTVERBS_DMABUF", "1"}}, [] {
    const Device device = open_device();
    const UniqueFd file(memfd_create("dmabuf", 0));
    ASSERT_EQ(ftruncate(file.get(), 8192), 0);
    const Mr mapped(try_dmabuf(device, 0x1000, file.get()));
    EXPECT_NE(mapped, nullptr);
    const PlacedRegion region(device.pd.get(), kPrivate0, 4096);
    EXPECT_NE(region.mr, nullptr);
  });
}

}  // namespace
}  // namespace verbatim::test
