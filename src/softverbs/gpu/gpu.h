// The GPUs of this process: what softverbs needs to copy to and from their memory. Everything is made when memory is
// registered. Beside kernels that wait for the network only asynchronous copies between pinned memory and GPU memory
// may run: any other call may wait for those kernels.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/gpu/cuda_driver.h"
#include "softverbs/gpu/gpu_address.h"

namespace verbatim::softverbs {

// An allocation of GPU memory, as CUDA describes it.
struct GpuAllocation {
  std::uint32_t gpu;
  std::uint64_t start;
  std::uint64_t bytes;
  std::uint64_t id;  // of no other allocation of the process, also after this one was freed
};

// The allocation at an address; nullopt: not GPU memory, or the program has not loaded CUDA.
std::optional<GpuAllocation> find_gpu_allocation(std::uint64_t address);
// The first one in a range: a registration of whole pages may begin before the memory.
std::optional<GpuAllocation> find_gpu_allocation(std::uint64_t address, std::size_t length);

// Each has copy engines of its own, and so streams of its own.
enum class CopyWay : std::uint8_t { kToHost, kFromHost, kOnDevice };
constexpr std::size_t kCopyWays = 3;

// One GPU. Thread-safe. Made once and kept until the process ends.
class Gpu {
 public:
  // EIO, with a line on stderr: CUDA refuses what is needed.
  static Result<Gpu*> open(std::uint32_t number);
  // nullptr: open() was not called. A forked child has none of its parent's.
  static Gpu* opened(std::uint32_t number);
  static void forget_those_of_parent();

  // A QP takes a lane at its first copy. Lanes are taken in turn, so that all streams are used equally.
  std::uint32_t take_lane() { return next_lane_.fetch_add(1, std::memory_order_relaxed); }
  // The order of copies is kept within a stream. Copies of one lane in one way share one.
  cuda::Stream stream(CopyWay way, std::uint32_t lane) const {
    return streams_[static_cast<std::size_t>(way)][lane % kLanes];
  }

  const cuda::Driver& cuda() const { return cuda_; }
  cuda::Context context() const { return context_; }

  cuda::Event take_event() VERBATIM_EXCLUDES(mutex_);  // nullptr: all are in use
  void return_event(cuda::Event event) VERBATIM_EXCLUDES(mutex_);

 private:
  static constexpr std::uint32_t kLanes = 8;
  static constexpr std::uint32_t kEvents = 512;

  Gpu(const cuda::Driver& cuda, cuda::Context context) : cuda_(cuda), context_(context) { events_.reserve(kEvents); }
  Status prepare();

  const cuda::Driver& cuda_;
  const cuda::Context context_;
  std::array<std::array<cuda::Stream, kLanes>, kCopyWays> streams_{};
  std::atomic<std::uint32_t> next_lane_{0};
  Mutex mutex_;
  std::vector<cuda::Event> events_ VERBATIM_GUARDED_BY(mutex_);
};

// Makes the GPU's context current in this thread while it lives. CUDA's copies and events need that.
class CurrentGpu {
 public:
  explicit CurrentGpu(const Gpu& gpu);
  ~CurrentGpu();
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

  bool is_set() const { return is_set_; }
  // Called by a thread of softverbs: no context of the program must be restored in it.
  static void keep_in_this_thread();

 private:
  const cuda::Driver& cuda_;
  bool is_set_ = false;
  bool is_pushed_ = false;
  int capture_mode_ = cuda::kRelaxedCaptureMode;  // of a thread of the program: the mode to return to
};

// A copy by the copy engines of one GPU. Not thread-safe.
class GpuTransfer {
 public:
  enum class State : std::uint8_t { kNone, kRunning, kDone, kFailed };

  GpuTransfer() = default;
  GpuTransfer(const GpuTransfer&) = delete;
  GpuTransfer& operator=(const GpuTransfer&) = delete;
  GpuTransfer(GpuTransfer&& other) noexcept;
  ~GpuTransfer();

  // `copy` queues the copy in the stream. False: no event is free, nothing was done; call again later.
  template <typename Copy>
  bool start(Gpu& gpu, CopyWay way, std::uint32_t lane, Copy copy) {
    cuda::Event event = begin(gpu);
    if (event == nullptr) return false;
    const CurrentGpu current(gpu);
    const cuda::Stream stream = gpu.stream(way, lane);
    end(event, stream, current.is_set() ? copy(gpu.cuda(), stream) : kContextIsGone);
    return true;
  }
  // Queues a copy alone. False: CUDA refuses.
  template <typename Copy>
  static bool queue(Gpu& gpu, CopyWay way, std::uint32_t lane, Copy copy) {
    const CurrentGpu current(gpu);
    return is_queued(gpu, current.is_set() ? copy(gpu.cuda(), gpu.stream(way, lane)) : kContextIsGone);
  }
  // Its end is that of all that is queued in the stream now. False: no event is free.
  bool watch(Gpu& gpu, CopyWay way, std::uint32_t lane) {
    return start(gpu, way, lane, [](const cuda::Driver&, cuda::Stream) { return cuda::kSuccess; });
  }
  State poll();
  // For a transfer that does not run: it has none from now on.
  void forget() { finish(State::kNone); }
  State state() const { return state_; }
  // Where it was queued. Transfers of one stream end in their order.
  cuda::Stream stream() const { return stream_; }

 private:
  static constexpr cuda::Status kContextIsGone = 709;

  static bool is_queued(Gpu& gpu, cuda::Status status);
  cuda::Event begin(Gpu& gpu);
  void end(cuda::Event event, cuda::Stream queued_in, cuda::Status status);
  void finish(State state);

  Gpu* gpu_ = nullptr;
  cuda::Event event_ = nullptr;
  cuda::Stream stream_ = nullptr;
  std::uint64_t asked_ns_ = 0;
  State state_ = State::kNone;
};

}  // namespace verbatim::softverbs
