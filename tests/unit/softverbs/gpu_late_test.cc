//: in softverbs_gpu_test

// SOFTVERBS_LATE_GPU_MS: what a device has written to GPU memory is visible some time after the completion of a
// receive, and what makes it visible. Where a test says that nothing is visible yet, the time is an hour.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <utility>

#include "base/unique_fd.h"
#include "gpu_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kLateGpuBytes = 300'000;  // several buffers

// GPU memory of this process that a QP pair of device 0 writes, and that both devices READ over QPs which are connected
// to themselves.
struct LateGpuTarget {
  explicit LateGpuTarget(const Place& from = kHost, const Place& to = kLegacy0) : pair(from, to, kLateGpuBytes) {
    connect(loop, loop);
    connect(other_loop, other_loop);
  }

  void write() const {
    ASSERT_EQ(pair.post_write(0, kLateGpuBytes), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  }
  bool is_untouched() const { return pair.target.untouched_outside(0, 0).empty(); }
  bool has_arrived() const { return !pair.target.find_wrong_byte(0, kLateGpuBytes, 1); }

  // READs the first byte of the target, as a flush does.
  static void flush(const Endpoint& endpoint, const PlacedRegion& into, const SendOptions& target) {
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_READ, {into.sge(0, 1)}, target), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  }
  void flush_by_its_device() const { flush(loop, into, pair.target.target()); }
  void flush_by_other_device() const {
    flush(other_loop, into_other, {.remote_addr = pair.target.address(), .rkey = of_other->rkey});
  }
  // Nothing but a READ of that memory by its own device makes it visible.
  void expect_shown_by_its_device_only() const {
    EXPECT_TRUE(is_untouched());
    flush_by_other_device();
    EXPECT_TRUE(is_untouched());
    flush(loop, into, into.target());
    EXPECT_TRUE(is_untouched()) << "a READ of host memory";
    flush_by_its_device();
    EXPECT_TRUE(has_arrived());
  }

  GpuPair pair;
  Device other = open_device(1);
  PlacedRegion into{pair.device.pd.get(), kHost, 8};
  PlacedRegion into_other{other.pd.get(), kHost, 8};
  Mr of_other{reg_dmabuf(other.pd.get(), pair.target.address(), kLateGpuBytes)};
  Endpoint loop{pair.device, gpu_endpoint()};
  Endpoint other_loop{other, gpu_endpoint()};
};

void check_late(const std::function<void()>& body) {
  check_in_new_process({{"SOFTVERBS_LATE_GPU_MS", "3600000"}}, body);
}

TEST(GpuLateOrder, Immediate_ComesBeforeTheBytes) {
  check_late([] {
    constexpr std::pair<Place, Place> kRoutes[] = {{kHost, kLegacy0}, {kLegacy0, kExportable1}, {kPrivate1, kPrivate1}};
    for (const auto& [from, to] : kRoutes) {
      SCOPED_TRACE(name_of(from) + " to " + name_of(to));
      const LateGpuTarget late(from, to);
      ASSERT_EQ(post_recv(late.pair.b.qp(), {}), 0);
      ASSERT_EQ(late.pair.post_write(0, kLateGpuBytes, 1, IBV_WR_RDMA_WRITE_WITH_IMM), 0);
      EXPECT_EQ(poll_one(late.pair.b.recv_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
      late.expect_shown_by_its_device_only();
    }
  });
}

TEST(GpuLateOrder, Send_CompletesBeforeItsBytes) {
  check_late([] {
    const LateGpuTarget late;
    ASSERT_EQ(post_recv(late.pair.b.qp(), {late.pair.target.sge()}), 0);
    ASSERT_EQ(post(late.pair.a.qp(), IBV_WR_SEND, {late.pair.source.sge()}), 0);
    EXPECT_EQ(poll_one(late.pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
    late.expect_shown_by_its_device_only();
  });
}

TEST(GpuLateOrder, FlushCompletions_ComeBeforeTheBytes) {
  check_late([] {
    LateGpuTarget late;
    ASSERT_EQ(post_recv(late.pair.b.qp(), {}), 0);
    late.write();
    late.pair.b.to_error();
    EXPECT_EQ(poll_one(late.pair.b.recv_cq()).status, IBV_WC_WR_FLUSH_ERR);
    late.expect_shown_by_its_device_only();
  });
}

// A WRITE to host memory is visible when it has completed: that memory has a setting of its own.
TEST(GpuLateOrder, HostMemory_IsNotLate) {
  check_late([] {
    const LateGpuTarget late;
    late.write();
    const PlacedRegion host(late.pair.device.pd.get(), kHost, kLateGpuBytes);
    ASSERT_EQ(post(late.pair.a.qp(), IBV_WR_RDMA_WRITE, {late.pair.source.sge()}, host.target()), 0);
    EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(host.find_wrong_byte(0, kLateGpuBytes, 1), std::nullopt);
    EXPECT_TRUE(late.is_untouched());
  });
}

TEST(GpuLateOrder, Atomic_ShowsEarlierWrites) {
  check_late([] {
    const LateGpuTarget late;
    const PlacedRegion word(late.pair.device.pd.get(), kLegacy0, 8);
    word.write_word(0, 1);
    late.write();
    EXPECT_TRUE(late.is_untouched());
    ASSERT_EQ(post_atomic(late.pair.a.qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, late.into.sge(), word.target(), 1), 0);
    EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(word.read_word(0), 2U);
    EXPECT_TRUE(late.has_arrived());
  });
}

TEST(GpuLateOrder, Time_ShowsThem) {
  check_in_new_process({{"SOFTVERBS_LATE_GPU_MS", "20"}}, [] {
    const LateGpuTarget late;
    const auto begin = std::chrono::steady_clock::now();
    late.write();
    for (Wait patience(kPatience); !late.has_arrived() && !patience.is_over();) patience.rest();
    EXPECT_TRUE(late.has_arrived());
    EXPECT_GE(std::chrono::steady_clock::now() - begin, 20ms);
  });
}

TEST(GpuLateOrder, Deregistration_ShowsThemAndNothingIsWrittenAfterwards) {
  check_late([] {
    LateGpuTarget late;
    late.write();
    EXPECT_TRUE(late.is_untouched());
    late.pair.target.mr.reset();
    EXPECT_TRUE(late.has_arrived());
    late.pair.target.poison();
    const PlacedRegion another(late.pair.device.pd.get(), kLegacy0, 8);
    LateGpuTarget::flush(late.loop, late.into, another.target());
    EXPECT_TRUE(late.is_untouched());
    late.of_other.reset();
    late.pair.target.release();
    EXPECT_TRUE(is_gpu_usable(0));
  });
}

TEST(GpuLateOrder, FreedMemory_IsDropped) {
  check_late([] {
    LateGpuTarget late;
    const PlacedRegion another(late.pair.device.pd.get(), kLegacy0, kLateGpuBytes);
    late.write();
    ASSERT_EQ(post(late.pair.a.qp(), IBV_WR_RDMA_WRITE, {late.pair.source.sge()}, another.target()), 0);
    EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
    late.pair.target.free();
    LateGpuTarget::flush(late.loop, late.into, another.target());
    EXPECT_EQ(another.find_wrong_byte(0, kLateGpuBytes, 1), std::nullopt);
  });
}

TEST(GpuLateOrder, AnswerOfARead_ComesAfterEarlierWrites) {
  check_late([] {
    const LateGpuTarget late;
    const PlacedRegion host(late.pair.device.pd.get(), kHost, kLateGpuBytes);
    host.fill(2);
    late.write();
    ASSERT_EQ(post(late.loop.qp(), IBV_WR_RDMA_READ, {late.pair.target.sge()}, host.target()), 0);
    EXPECT_EQ(poll_one(late.loop.send_cq()).status, IBV_WC_SUCCESS);
    late.flush_by_its_device();
    EXPECT_EQ(late.pair.target.find_wrong_byte(0, kLateGpuBytes, 2), std::nullopt);
  });
}

// With both settings, one receive into both kinds of memory.
TEST(GpuLateOrder, ReceiveIntoBothKinds_ShowsHostMemoryOnly) {
  constexpr std::size_t kHalf = kLateGpuBytes / 2;
  check_in_new_process({{"SOFTVERBS_LATE_HOST_MS", "3600000"}, {"SOFTVERBS_LATE_GPU_MS", "3600000"}}, [] {
    const LateGpuTarget late;
    const PlacedRegion host(late.pair.device.pd.get(), kHost, kHalf);
    ASSERT_EQ(post_recv(late.pair.b.qp(), {late.pair.target.sge(0, kHalf), host.sge()}), 0);
    ASSERT_EQ(post(late.pair.a.qp(), IBV_WR_SEND, {late.pair.source.sge()}), 0);
    EXPECT_EQ(poll_one(late.pair.b.recv_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(find_wrong_byte(host.read(0, kHalf), 1, kHalf), std::nullopt);
    EXPECT_TRUE(late.is_untouched());
    late.flush_by_its_device();
    EXPECT_EQ(late.pair.target.find_wrong_byte(0, kHalf, 1), std::nullopt);
  });
}

// Memory that is also registered for Data Direct: nothing orders the writes on the two paths.
TEST(GpuLateOrder, DataDirect_IsAPathOfItsOwn) {
  check_in_new_process({{"SOFTVERBS_LATE_GPU_MS", "3600000"}, {"SOFTVERBS_DATA_DIRECT", "5356:41:00.0"}}, [] {
    using Register = ibv_mr*(ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int, int);
    void* const mlx5 = dlopen(std::getenv("MLX5_TEST_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(mlx5, nullptr) << dlerror();
    auto* const register_dmabuf = reinterpret_cast<Register*>(dlvsym(mlx5, "mlx5dv_reg_dmabuf_mr", "MLX5_1.25"));
    ASSERT_NE(register_dmabuf, nullptr);
    const LateGpuTarget late;
    const std::uint64_t page = late.pair.target.address() / 4096 * 4096;
    const UniqueFd dmabuf(dmabuf_of(late.pair.target.address(), kLateGpuBytes));
    constexpr int kDataDirect = 1;
    const Mr direct(register_dmabuf(late.pair.device.pd.get(), 0, kLateGpuBytes + 4096, page, dmabuf.get(),
                                    kAtomicAccess, kDataDirect));
    ASSERT_NE(direct, nullptr);
    const SendOptions by_direct{.remote_addr = late.pair.target.address(), .rkey = direct->rkey};

    ASSERT_EQ(post(late.pair.a.qp(), IBV_WR_RDMA_WRITE, {late.pair.source.sge()}, by_direct), 0);
    EXPECT_EQ(poll_one(late.pair.a.send_cq()).status, IBV_WC_SUCCESS);
    late.flush_by_its_device();
    EXPECT_TRUE(late.is_untouched());
    LateGpuTarget::flush(late.loop, late.into, by_direct);
    EXPECT_TRUE(late.has_arrived());

    late.pair.target.poison();
    late.write();
    LateGpuTarget::flush(late.loop, late.into, by_direct);
    EXPECT_TRUE(late.is_untouched());
    late.flush_by_its_device();
    EXPECT_TRUE(late.has_arrived());
  });
}

// NCCL's flush: the owner of the memory READs what another process has written.
TEST(GpuLateOrder, OfAPeer_AreShownByAReadOfTheOwner) {
  check_late([] {
    const LateGpuTarget late;
    Endpoint endpoint(late.pair.device, gpu_endpoint());
    Peer peer({.region_bytes = kLateGpuBytes, .memory = kLegacy1, .access = kAtomicAccess});
    GpuPeerPair::connect_peer(endpoint, peer);
    peer.fill(0, kLateGpuBytes, 1);
    ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, kLateGpuBytes, late.pair.target.target()), 0);
    EXPECT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
    peer.kill();
    late.expect_shown_by_its_device_only();
  });
}

TEST(GpuLateOrder, ToAPeer_AreShownByAReadOfTheSender) {
  check_late([] {
    GpuPeerPair late(kLegacy0, kLegacy1, kLateGpuBytes);
    const PlacedRegion into(late.device.pd.get(), kHost, kLateGpuBytes);
    late.region.fill(4);
    ASSERT_EQ(late.post_write(0, kLateGpuBytes), 0);
    EXPECT_EQ(poll_one(late.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_TRUE(late.peer.untouched_outside(0, 0));
    ASSERT_EQ(post(late.a.qp(), IBV_WR_RDMA_READ, {into.sge()}, late.peer.target(0)), 0);
    EXPECT_EQ(poll_one(late.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(into.find_wrong_byte(0, kLateGpuBytes, 4), std::nullopt);
    EXPECT_EQ(late.peer.find_wrong_byte(0, kLateGpuBytes, 4), std::nullopt);
  });
}

}  // namespace
}  // namespace verbatim::test
