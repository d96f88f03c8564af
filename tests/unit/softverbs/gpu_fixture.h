// For tests of GPU memory.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "support/child.h"
#include "support/cuda/standin_cuda.h"
#include "support/gpu_memory.h"
#include "support/verbs_peer.h"

namespace verbatim::test {

constexpr Place kHost{};
constexpr Place kLegacy0{MemoryKind::kLegacy, 0};
constexpr Place kLegacy1{MemoryKind::kLegacy, 1};
constexpr Place kExportable0{MemoryKind::kExportable, 0};
constexpr Place kExportable1{MemoryKind::kExportable, 1};
constexpr Place kPrivate0{MemoryKind::kPrivate, 0};
constexpr Place kPrivate1{MemoryKind::kPrivate, 1};
constexpr Place kJoined1{MemoryKind::kJoined, 1};

inline bool is_setting(const char* name, std::string_view value) {
  const char* const text = std::getenv(name);
  return text != nullptr && text == value;
}
inline bool is_engine_inline() {
  return is_setting("SOFTVERBS_ENGINE", "inline");
}
inline bool keeps_order() {
  return !is_setting("SOFTVERBS_ORDERING", "adaptive-routing");
}

#define VERBATIM_NEEDS_STANDIN() \
  if (!cuda().is_standin()) GTEST_SKIP() << "needs the stand-in for CUDA"

inline EndpointOptions gpu_endpoint(const Timers& timers = {}) {
  return {.access = kAtomicAccess, .timers = timers};
}

// Two connected QPs of this process, each with a memory region.
struct GpuPair {
  GpuPair(const Place& from, const Place& to, std::size_t bytes, const EndpointOptions& options = gpu_endpoint())
      : source(device.pd.get(), from, bytes, 3),
        target(device.pd.get(), to, bytes, 13),
        a(device, options),
        b(device, options) {
    connect(a, b);
    source.fill(1);  // so that what it sends differs from poison
  }
  int post_write(std::size_t offset, std::size_t length, std::uint64_t wr_id = 0,
                 ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE) const {
    SendOptions options = target.target(wr_id, offset);
    options.imm = static_cast<std::uint32_t>(wr_id);
    return post(a.qp(), opcode, {source.sge(offset, length)}, options);
  }

  // Afterwards the memory of other GPUs is mapped where that is possible: copies go directly.
  void warm_up() const {
    ASSERT_EQ(post_write(0, 8), 0);
    EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
    std::this_thread::sleep_for(20ms);
  }

  Device device = open_device();
  PlacedRegion source;
  PlacedRegion target;
  Endpoint a;
  Endpoint b;
};

// A QP of this process and one of another process, each with a memory region.
struct GpuPeerPair {
  GpuPeerPair(const Place& own, const Place& peers, std::size_t bytes, const EndpointOptions& options = gpu_endpoint())
      : region(device.pd.get(), own, bytes, 3),
        a(device, options),
        peer({.region_bytes = bytes, .memory = peers, .access = kAtomicAccess}) {
    connect_peer(a, peer);
  }
  static void connect_peer(Endpoint& endpoint, Peer& other) {
    endpoint.connect(other.address());
    other.connect(endpoint.address());
  }
  int post_write(std::size_t offset, std::size_t length, std::uint64_t wr_id = 0,
                 ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE) const {
    SendOptions options = peer.target(wr_id, offset);
    options.imm = static_cast<std::uint32_t>(wr_id);
    return post(a.qp(), opcode, {region.sge(offset, length)}, options);
  }

  Device device = open_device();
  PlacedRegion region;
  Endpoint a;
  Peer peer;
};

// While it lives, copies of this process and of the peer are later than usual.
class SlowCopies {
 public:
  explicit SlowCopies(unsigned mean_us, Peer* peer = nullptr) : peer_(peer) { set(mean_us); }
  ~SlowCopies() { set(kUsualDelayUs); }
  SlowCopies(const SlowCopies&) = delete;
  SlowCopies& operator=(const SlowCopies&) = delete;

 private:
  void set(unsigned mean_us) {
    set_copy_delay_us(mean_us);
    if (peer_ != nullptr) peer_->standin(Peer::Standin::kSetDelay, mean_us);
  }

  Peer* const peer_;
};

// A kernel that spins on every GPU of this process while the object lives, but not longer than 20 s: then a call that
// waits for it returns, and the test fails instead of hanging.
class SpinningKernels {
 public:
  explicit SpinningKernels(Peer* peer = nullptr);
  ~SpinningKernels() { end(); }
  SpinningKernels(const SpinningKernels&) = delete;
  SpinningKernels& operator=(const SpinningKernels&) = delete;

  void end();
  // How often this process has waited for a kernel since the kernels run. Copies of pageable memory count too.
  std::uint64_t waits() const;
  std::uint64_t waits_of_peer() const { return peer_->standin(Peer::Standin::kWaits) - peers_waits_; }

 private:
  void end_own();

  Peer* peer_;
  std::uint64_t waits_ = 0;
  std::uint64_t peers_waits_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_ended_ = false;
  std::thread watchdog_;
};

// Runs the current test again in a new process with these variables, where `body` is executed. For settings that a
// process reads once: CUDA does not survive fork. Returns what the process printed.
std::string check_in_new_process(const Variables& variables, const std::function<void()>& body);

}  // namespace verbatim::test
