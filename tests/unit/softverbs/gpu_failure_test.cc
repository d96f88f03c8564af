//: in softverbs_gpu_test

// GPU memory that goes away, processes that die or stop, and errors of CUDA: requests fail, nothing hangs, and memory
// that was deregistered is not accessed any more.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>

#include "base/unique_fd.h"
#include "gpu_fixture.h"
#include "softverbs/host/layout.h"

namespace verbatim::test {
namespace {

using FailureClock = std::chrono::steady_clock;

constexpr std::size_t kBlock = 50'000;
constexpr std::size_t kBlocks = 16;
constexpr unsigned kFailureDelayUs = 150;
// 16.8 ms per attempt, four attempts.
constexpr Timers kFailureTimers{.timeout = 12, .retry_count = 3};

bool are_gpus_usable() {
  bool usable = true;
  for (unsigned gpu = 0; gpu < gpu_count(); ++gpu) usable = is_gpu_usable(gpu) && usable;
  return usable;
}

// The files of softverbs in /dev/shm of one namespace.
std::vector<std::string> shared_files(const std::string& name_space) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("softverbs") && name.find("-" + name_space) != std::string::npos) names.push_back(name);
  }
  return names;
}

// The staging buffers that this process holds.
unsigned taken_buffers() {
  const char* const name_space = std::getenv("SOFTVERBS_NAMESPACE");
  if (name_space == nullptr) return 0;
  unsigned taken = 0;
  for (const std::string& name : shared_files(name_space)) {
    if (!name.ends_with(std::string("-") + name_space)) continue;  // a segment
    const UniqueFd file(open(("/dev/shm/" + name).c_str(), O_RDONLY | O_CLOEXEC));
    void* const mapped = mmap(nullptr, sizeof(softverbs::Registry), PROT_READ, MAP_SHARED, file.get(), 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("mmap of the registry");
    const auto& registry = *static_cast<const softverbs::Registry*>(mapped);
    softverbs::Incarnation me = 0;
    for (const softverbs::ProcessSlot& slot : registry.slots) {
      if (slot.pid.load() == getpid()) me = slot.incarnation.load();
    }
    for (const softverbs::StagingBuffer& buffer : registry.gpu_staging.buffers) {
      // One that is abandoned is free when the process that copies has ended.
      softverbs::StagingWord word{};
      std::memcpy(&word, &buffer.word, sizeof word);
      if (me != 0 && buffer.user.load() == me && word.state != softverbs::StagingState::kAbandoned) ++taken;
    }
    munmap(mapped, sizeof(softverbs::Registry));
  }
  return taken;
}

// Keeps WRITEs of one block outstanding in a thread of its own, until one of them fails or stop() is called.
class Writer {
 public:
  Writer(Endpoint& endpoint, ibv_sge source, const SendOptions& target)
      : thread_([this, &endpoint, source, target] { run(endpoint, source, target); }) {}
  ~Writer() { stop(); }

  // The status that ended it; IBV_WC_SUCCESS: stop() did.
  ibv_wc_status stop() {
    is_to_stop_ = true;
    if (thread_.joinable()) thread_.join();
    return status_;
  }
  // Waits until so many WRITEs are complete, or one has failed.
  void await(std::uint64_t count) const {
    const auto end = FailureClock::now() + kCompletionTimeout;
    while (completed_ < count && status_ == IBV_WC_SUCCESS && FailureClock::now() < end) std::this_thread::yield();
  }
  ibv_wc_status await_end() {
    const auto end = FailureClock::now() + kCompletionTimeout;
    while (status_ == IBV_WC_SUCCESS && FailureClock::now() < end) std::this_thread::yield();
    return stop();
  }

 private:
  void run(Endpoint& endpoint, ibv_sge source, const SendOptions& target) {
    constexpr std::uint64_t kAhead = 16;
    std::uint64_t posted = 0;
    while (!is_to_stop_ || completed_ < posted) {
      for (; !is_to_stop_ && posted - completed_ < kAhead; ++posted) {
        if (post(endpoint.qp(), IBV_WR_RDMA_WRITE, {source}, target) != 0) return;
      }
      ibv_wc wc{};
      if (ibv_poll_cq(endpoint.send_cq(), 1, &wc) != 1) {
        std::this_thread::yield();
        continue;
      }
      if (wc.status != IBV_WC_SUCCESS) {
        status_ = wc.status;
        return;
      }
      ++completed_;
    }
  }

  std::atomic<bool> is_to_stop_{false};
  std::atomic<std::uint64_t> completed_{0};
  std::atomic<ibv_wc_status> status_{IBV_WC_SUCCESS};
  std::thread thread_;
};

class GpuFailures : public testing::Test {
 protected:
  void SetUp() override { VERBATIM_NEEDS_STANDIN(); }

  // The device still works, with new QPs, new memory and a new peer.
  static void expect_working_device() {
    GpuPeerPair pair(kLegacy0, kExportable1, kBlock);
    pair.region.fill(77);
    ASSERT_EQ(pair.post_write(0, kBlock), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.peer.find_wrong_byte(0, kBlock, 77), std::nullopt);
    EXPECT_TRUE(are_gpus_usable());
  }
};

TEST_F(GpuFailures, DeregistrationDuringTraffic_MemoryCanBeFreedAtOnce) {
  const SlowCopies slow(kFailureDelayUs);
  for (const auto& [from, to] :
       {std::pair{kExportable0, kExportable1}, std::pair{kExportable0, kExportable0}, std::pair{kPrivate1, kPrivate0},
        std::pair{kHost, kPrivate0}, std::pair{kPrivate1, kHost}}) {
    for (const bool is_source : {true, false}) {
      SCOPED_TRACE(name_of(from) + " to " + name_of(to) + (is_source ? ", source" : ", target"));
      GpuPair pair(from, to, kBlock);
      Writer writer(pair.a, pair.source.sge(), pair.target.target());
      writer.await(is_engine_inline() ? 2 : 20);
      PlacedRegion& region = is_source ? pair.source : pair.target;
      if (region.place().is_gpu()) {
        region.release();
      } else {
        region.mr.reset();
      }
      EXPECT_EQ(writer.await_end(), is_source ? IBV_WC_LOC_PROT_ERR : IBV_WC_REM_ACCESS_ERR);
      std::this_thread::sleep_for(2ms);
      ASSERT_TRUE(are_gpus_usable());
    }
  }
}

// A free address is used again soon: a late copy would change what lies there now.
TEST_F(GpuFailures, DeregistrationDuringTraffic_NewMemoryStaysUntouched) {
  const SlowCopies slow(kFailureDelayUs);
  for (const Place& place : {kExportable0, kPrivate0, kLegacy0}) {
    SCOPED_TRACE(name_of(place));
    GpuPair pair(kLegacy0, place, kBlock);
    Writer writer(pair.a, pair.source.sge(), pair.target.target());
    writer.await(is_engine_inline() ? 2 : 20);
    const std::uint64_t address = pair.target.address();
    pair.target.release();
    const GpuBuffer next(place, kBlock, 13);
    EXPECT_EQ(next.address(), address) << "the stand-in gives a free address again";
    EXPECT_EQ(writer.await_end(), IBV_WC_REM_ACCESS_ERR);
    std::this_thread::sleep_for(2ms);
    EXPECT_EQ(next.untouched_outside(0, 0), "");
  }
}

TEST_F(GpuFailures, PeerDeregistersDuringTraffic_MemoryCanBeFreedAtOnce) {
  for (const auto& [own, peers] :
       {std::pair{kLegacy0, kExportable1}, std::pair{kPrivate0, kPrivate1}, std::pair{kHost, kExportable0}}) {
    SCOPED_TRACE(name_of(own) + " to " + name_of(peers));
    GpuPeerPair pair(own, peers, kBlock);
    const SlowCopies slow(kFailureDelayUs);
    pair.peer.standin(Peer::Standin::kSetDelay, kFailureDelayUs);
    Writer writer(pair.a, pair.region.sge(), pair.peer.target(0));
    writer.await(is_engine_inline() ? 2 : 20);
    pair.peer.release();
    EXPECT_EQ(writer.await_end(), IBV_WC_REM_ACCESS_ERR);
    EXPECT_EQ(pair.peer.standin(Peer::Standin::kUsable), 1U);
    EXPECT_TRUE(are_gpus_usable());
  }
}

TEST_F(GpuFailures, DeregistrationWhilePeerStreams_MemoryCanBeFreedAtOnce) {
  for (const auto& [own, peers] : {std::pair{kExportable0, kLegacy1}, std::pair{kPrivate0, kPrivate1}}) {
    SCOPED_TRACE(name_of(own) + " from " + name_of(peers));
    GpuPeerPair pair(own, peers, kBlock);
    const SlowCopies slow(kFailureDelayUs);
    pair.peer.standin(Peer::Standin::kSetDelay, kFailureDelayUs);
    for (std::uint64_t i = 0; i < 32; ++i) ASSERT_EQ(post_recv(pair.a.qp(), {pair.region.sge()}, i), 0);
    pair.peer.fill(0, kBlock, 1);
    pair.peer.stream(pair.region.target());
    std::this_thread::sleep_for(20ms);
    pair.region.release();
    const GpuBuffer next(own, kBlock, 3);
    std::this_thread::sleep_for(5ms);
    EXPECT_EQ(next.untouched_outside(0, 0), "");
    pair.peer.kill();
    EXPECT_TRUE(are_gpus_usable());
  }
}

// Both QPs send when one is destroyed: the engine must not wait for the QP that waits for it.
TEST_F(GpuFailures, DestroyedQpThatAlsoSends_DoesNotHang) {
  const SlowCopies slow(kFailureDelayUs);
  for (unsigned round = 0; round < 6; ++round) {
    GpuPair pair(kExportable0, kExportable1, kBlock, gpu_endpoint({.timeout = 8, .retry_count = 1}));
    for (std::uint64_t i = 0; i < kBlocks; ++i) {
      ASSERT_EQ(pair.post_write(0, kBlock, i), 0);
      ASSERT_EQ(post(pair.b.qp(), IBV_WR_RDMA_WRITE, {pair.target.sge()}, pair.source.target(i)), 0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
    if (round % 2 == 0) {
      pair.b.destroy();
    } else {
      pair.b.to_reset();
    }
    pair.target.release();
    pair.source.release();
  }
  EXPECT_TRUE(are_gpus_usable());
}

TEST_F(GpuFailures, KilledPeer_EndsInRetryExceeded) {
  for (const auto& [own, peers] :
       {std::pair{kLegacy0, kLegacy1}, std::pair{kPrivate0, kPrivate0}, std::pair{kHost, kExportable1}}) {
    SCOPED_TRACE(name_of(own) + " to " + name_of(peers));
    GpuPeerPair pair(own, peers, kBlock, gpu_endpoint(kFailureTimers));
    const SlowCopies slow(kFailureDelayUs);
    pair.peer.standin(Peer::Standin::kSetDelay, kFailureDelayUs);
    Writer writer(pair.a, pair.region.sge(), pair.peer.target(0));
    writer.await(is_engine_inline() ? 2 : 20);
    pair.peer.kill();
    EXPECT_EQ(writer.await_end(), IBV_WC_RETRY_EXC_ERR);
    pair.region.release();
  }
  expect_working_device();
}

TEST_F(GpuFailures, PeerKilledWhileItWrites_MemoryCanBeFreed) {
  for (const auto& [own, peers] :
       {std::pair{kExportable0, kLegacy1}, std::pair{kPrivate0, kPrivate1}, std::pair{kPrivate0, kHost}}) {
    SCOPED_TRACE(name_of(own) + " from " + name_of(peers));
    GpuPeerPair pair(own, peers, kBlock, gpu_endpoint(kFailureTimers));
    pair.peer.standin(Peer::Standin::kSetDelay, 1000);
    const SlowCopies slow(5'000);
    pair.peer.fill(0, kBlock, 1);
    for (std::uint64_t i = 0; i < 8; ++i) {
      ASSERT_EQ(pair.peer.post(IBV_WR_RDMA_WRITE, 0, kBlock, pair.region.target(i)), 0);
    }
    std::this_thread::sleep_for(5ms);
    pair.peer.kill();
    pair.region.release();
    const GpuBuffer next(own, kBlock, 3);
    std::this_thread::sleep_for(40ms);
    EXPECT_EQ(next.untouched_outside(0, 0), "");
  }
  expect_working_device();
}

TEST_F(GpuFailures, StoppedPeer_OthersGoOnAndItsCopiesFollow) {
  for (const Place& place : {kPrivate0, kExportable1}) {
    SCOPED_TRACE(name_of(place));
    GpuPeerPair pair(kLegacy0, place, kBlock, gpu_endpoint({.timeout = 16, .retry_count = 7}));
    GpuPair other(kLegacy0, kPrivate1, kBlock);
    pair.region.fill(5);
    ASSERT_EQ(pair.post_write(0, 64), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    pair.peer.stop();
    ASSERT_EQ(pair.post_write(0, kBlock), 0);
    // With `inline` the post itself waits for the stopped process, for half a second at most.
    other.source.fill(6);
    ASSERT_EQ(other.post_write(0, kBlock), 0);
    EXPECT_EQ(poll_one(other.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(other.target.find_wrong_byte(0, kBlock, 6), std::nullopt);
    pair.peer.resume();
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.peer.find_wrong_byte(0, kBlock, 5), std::nullopt);
  }
}

TEST_F(GpuFailures, StoppedPeer_TheQpCanBeDestroyedAndTheMemoryFreed) {
  GpuPeerPair pair(kPrivate0, kPrivate0, kBlock, gpu_endpoint(kFailureTimers));
  pair.peer.stop();
  ASSERT_EQ(pair.post_write(0, kBlock), 0);
  std::this_thread::sleep_for(5ms);
  pair.a.destroy();
  pair.region.release();
  EXPECT_TRUE(are_gpus_usable());
  pair.peer.resume();
  EXPECT_EQ(pair.peer.standin(Peer::Standin::kUsable), 1U);
}

// A peer whose memory only it can copy, with WRITEs on many QPs: they use as many staging buffers as they may.
struct BusyPeer {
  explicit BusyPeer(const Device& device) : region(device.pd.get(), kHost, kBytes) {
    for (std::uint32_t qp = 0; qp < kQps; ++qp) {
      endpoints.push_back(std::make_unique<Endpoint>(device, gpu_endpoint(kFailureTimers)));
      endpoints.back()->connect(peer.address(qp));
      peer.connect(endpoints.back()->address(), qp);
    }
  }
  void post_writes() const {
    for (const auto& endpoint : endpoints) {
      ASSERT_EQ(post(endpoint->qp(), IBV_WR_RDMA_WRITE, {region.sge()}, peer.target(1)), 0);
    }
    std::this_thread::sleep_for(30ms);
  }
  void expect_statuses(ibv_wc_status status) const {
    for (const auto& endpoint : endpoints) EXPECT_EQ(poll_one(endpoint->send_cq()).status, status);
  }

  static constexpr std::size_t kBytes = 2 << 20;
  static constexpr std::uint32_t kQps = 12;
  PlacedRegion region;
  Peer peer{{.qps = kQps, .region_bytes = kBytes, .memory = kPrivate0, .access = kAtomicAccess}};
  std::vector<std::unique_ptr<Endpoint>> endpoints;
};

// Every killed peer takes the buffers along into which it was copying. They must not be missing.
TEST_F(GpuFailures, KilledBusyPeers_StagingBuffersRemain) {
  if (is_engine_inline() || !keeps_order()) GTEST_SKIP() << "few buffers are in use at a time";
  const Device device = open_device();
  for (unsigned round = 0; round < 3; ++round) {
    BusyPeer busy(device);
    busy.peer.standin(Peer::Standin::kSetDelay, 100'000);
    busy.post_writes();
    busy.peer.kill();
    busy.expect_statuses(IBV_WC_RETRY_EXC_ERR);
  }
  expect_working_device();
}

TEST_F(GpuFailures, StoppedBusyPeer_OthersGoOn) {
  if (is_engine_inline() || !keeps_order()) GTEST_SKIP() << "a post waits for its copies";
  const GpuPair other(kHost, kPrivate1, kBlock);
  BusyPeer busy(other.device);
  busy.peer.stop();
  busy.post_writes();
  other.source.fill(6);
  ASSERT_EQ(other.post_write(0, kBlock), 0);
  EXPECT_EQ(poll_one(other.a.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(other.target.find_wrong_byte(0, kBlock, 6), std::nullopt);
  busy.peer.resume();
  busy.expect_statuses(IBV_WC_SUCCESS);
}

void expect_failed_copy(const Place& from, const Place& to, ibv_wc_status status) {
  const std::string output = check_in_new_process({}, [&] {
    GpuPair pair(from, to, kBlock);
    Endpoint other(pair.device, gpu_endpoint());
    connect(other, other);
    const Region source(pair.device.pd.get(), 64);
    const Region target(pair.device.pd.get(), 64);
    cuda().standin_cuda_fail_copy(1, CUDA_ERROR_LAUNCH_FAILED);
    for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(pair.post_write(0, kBlock, i), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, status);
    for (const ibv_wc& wc : poll(pair.a.send_cq(), 3)) EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(pair.a.state(), IBV_QPS_ERR);
    if (status == IBV_WC_REM_OP_ERR) {
      EXPECT_EQ(pair.b.state(), IBV_QPS_ERR);
    }
    // Host memory is not affected.
    source.fill(3);
    ASSERT_EQ(
        post(other.qp(), IBV_WR_RDMA_WRITE, {source.sge()}, {.remote_addr = target.address(), .rkey = target.mr->rkey}),
        0);
    EXPECT_EQ(poll_one(other.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(find_wrong_byte(target.buffer.bytes(), 3), std::nullopt);
    pair.source.mr.reset();
    pair.target.mr.reset();
  });
  if (output.empty()) return;  // this is the new process
  const std::size_t line = output.find("a copy of GPU memory failed: CUDA_ERROR_LAUNCH_FAILED");
  EXPECT_NE(line, std::string::npos) << output;
  EXPECT_EQ(output.find("a copy of GPU memory failed", line + 1), std::string::npos) << "one line is enough";
}

TEST_F(GpuFailures, CopyToTargetFails_IsRemoteOperationError) {
  expect_failed_copy(kHost, kLegacy0, IBV_WC_REM_OP_ERR);
}

TEST_F(GpuFailures, CopyFromSourceFails_IsLocalProtectionError) {
  expect_failed_copy(kPrivate1, kHost, is_engine_inline() || !keeps_order() ? IBV_WC_REM_OP_ERR : IBV_WC_LOC_PROT_ERR);
}

TEST_F(GpuFailures, DirectCopyFails_IsRemoteOperationError) {
  if (is_setting("SOFTVERBS_GPU_COPY", "staged")) GTEST_SKIP() << "needs direct copies";
  expect_failed_copy(kLegacy0, kLegacy0, IBV_WC_REM_OP_ERR);
}

TEST_F(GpuFailures, CopyByTheOwnerFails_IsRemoteOperationError) {
  GpuPeerPair pair(kHost, kPrivate0, kBlock);
  pair.peer.standin(Peer::Standin::kFailCopy, 1);
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(pair.post_write(0, kBlock, i), 0);
  EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_REM_OP_ERR);
  for (const ibv_wc& wc : poll(pair.a.send_cq(), 3)) EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
  pair.region.release();
  pair.peer.kill();
  expect_working_device();
}

TEST_F(GpuFailures, ContextGoesAwayDuringTraffic_RequestsFail) {
  for (const bool is_source : {true, false}) {
    check_in_new_process({{"GPU_TEST_IS_SOURCE", is_source ? "1" : "0"}}, [] {
      const bool kills_source = is_setting("GPU_TEST_IS_SOURCE", "1");
      GpuPair pair(kExportable0, kExportable1, kBlock);
      const SlowCopies slow(kFailureDelayUs);
      Writer writer(pair.a, pair.source.sge(), pair.target.target());
      writer.await(is_engine_inline() ? 2 : 20);
      cuda().standin_cuda_kill_context(kills_source ? 0 : 1);
      if (!is_setting("SOFTVERBS_GPU_COPY", "staged") && !kills_source) {
        // The source's GPU may do all the work.
        writer.stop();
      } else {
        EXPECT_NE(writer.await_end(), IBV_WC_SUCCESS);
      }
      pair.source.mr.reset();
      pair.target.mr.reset();
    });
    if (std::getenv("SOFTVERBS_TEST_INNER_PROCESS") != nullptr) return;
  }
}

TEST_F(GpuFailures, ContextOfThePeerGoesAway_RequestsFail) {
  GpuPeerPair pair(kHost, kPrivate0, kBlock);
  Writer writer(pair.a, pair.region.sge(), pair.peer.target(0));
  writer.await(is_engine_inline() ? 2 : 20);
  pair.peer.standin(Peer::Standin::kKillContext, 0);
  EXPECT_EQ(writer.await_end(), IBV_WC_REM_OP_ERR);
  pair.region.release();
  pair.peer.kill();
  expect_working_device();
}

// A program that starts another program by fork goes on. CUDA does not work in the child, but host memory does.
TEST_F(GpuFailures, Fork_ParentGoesOnAndChildUsesHostMemory) {
  GpuPair pair(kLegacy0, kExportable1, kBlock);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    for (std::uint64_t i = 0; i < kBlocks; ++i) ASSERT_EQ(pair.post_write(0, kBlock, i), 0);
    std::fflush(nullptr);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      if (round == 1) _exit(0);  // exit() would report what threads of the parent held on their stacks as leaks
      try {
        const Device device = open_device();
        if (const int failed = write_in_child(device); failed != 0) _exit(failed);
        const auto gpu_memory = reinterpret_cast<void*>(pair.target.address());
        _exit(verbs().reg_mr(device.pd.get(), gpu_memory, kBlock, kAllAccess) == nullptr ? 0 : 6);
      } catch (const std::exception&) {
        _exit(2);
      }
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    for (const ibv_wc& wc : poll(pair.a.send_cq(), kBlocks)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    pair.source.fill(round);
    ASSERT_EQ(pair.post_write(0, kBlock), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.target.find_wrong_byte(0, kBlock, round), std::nullopt);
  }
}

// Faults decide about single packets, so each step is executed alone.
TEST_F(GpuFailures, FaultsAndRates_GpuMemoryArrivesWhole) {
  const std::pair<const char*, const char*> settings[] = {
      {"SOFTVERBS_FAULTS", "drop-ack op=write_imm nth=2 count=3; drop-request op=write_imm nth=7 times=2"},
      {"SOFTVERBS_FAULTS", "delay by=1ms jitter=500us; rnr op=write_imm nth=3 times=2"},
      {"SOFTVERBS_LINK_GBPS", "100"},
  };
  for (const auto& [name, value] : settings) {
    if (is_engine_inline() && std::string_view(name) == "SOFTVERBS_LINK_GBPS") continue;
    const char* const inner = std::getenv("GPU_TEST_SETTING");
    if (inner != nullptr && std::string_view(inner) != value) continue;
    check_in_new_process({{name, value}, {"GPU_TEST_SETTING", value}}, [] {
      const GpuPair pair(kLegacy0, kPrivate1, kBlock * kBlocks, gpu_endpoint({.timeout = 12}));
      pair.source.fill(8);
      for (std::uint64_t i = 0; i < kBlocks; ++i) {
        ASSERT_EQ(post_recv(pair.b.qp(), {}, i), 0);
        ASSERT_EQ(pair.post_write(i * kBlock, kBlock, i, IBV_WR_RDMA_WRITE_WITH_IMM), 0);
      }
      const std::vector<ibv_wc> received = poll(pair.b.recv_cq(), kBlocks);
      ASSERT_EQ(received.size(), kBlocks);
      for (std::uint64_t i = 0; i < kBlocks; ++i) EXPECT_EQ(received[i].imm_data, i);
      EXPECT_EQ(pair.target.find_wrong_byte(0, kBlock * kBlocks, 8), std::nullopt);
      EXPECT_EQ(pair.target.untouched_outside(0, kBlock * kBlocks), "");
      for (const ibv_wc& wc : poll(pair.a.send_cq(), kBlocks)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    });
  }
}

TEST_F(GpuFailures, EndOfAllProcesses_LeavesNoFile) {
  const std::string name_space = "gpu-files-" + std::to_string(getpid());
  check_in_new_process({{"SOFTVERBS_NAMESPACE", name_space}}, [] {
    GpuPeerPair pair(kLegacy0, kPrivate0, kBlock);
    ASSERT_EQ(pair.post_write(0, kBlock), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_FALSE(shared_files(std::getenv("SOFTVERBS_NAMESPACE")).empty());
    for (std::uint64_t i = 0; i < kBlocks; ++i) ASSERT_EQ(pair.post_write(0, kBlock, i), 0);
    pair.peer.kill();
  });
  if (std::getenv("SOFTVERBS_TEST_INNER_PROCESS") != nullptr) return;
  EXPECT_EQ(shared_files(name_space), std::vector<std::string>());
}

// After all tests this process must hold no staging buffer: it would be missing for every process of the host.
class StagingBuffers : public testing::Environment {
  void TearDown() override { EXPECT_EQ(taken_buffers(), 0U) << "staging buffers are still taken"; }
};

const testing::Environment* const g_staging_buffers = testing::AddGlobalTestEnvironment(new StagingBuffers);

}  // namespace
}  // namespace verbatim::test
