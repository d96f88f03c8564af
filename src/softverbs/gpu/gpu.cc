#include "softverbs/gpu/gpu.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "softverbs/host/inherited.h"

namespace verbatim::softverbs {
namespace {

std::array<std::atomic<Gpu*>, kMaxGpus> g_gpus{};

// initial-exec: clang's leak checker crashes when it looks at other variables of threads in a library that dlopen
// loads.
[[gnu::tls_model("initial-exec")]] thread_local bool t_keeps_context = false;
[[gnu::tls_model("initial-exec")]] thread_local cuda::Context t_kept_context = nullptr;

void exchange_capture_mode(const cuda::Driver& driver, int& mode) {
  if (driver.thread_exchange_capture_mode != nullptr) driver.thread_exchange_capture_mode(&mode);
}

Error refused(const char* call, const cuda::Driver& driver, cuda::Status status) {
  VERBATIM_WARN("GPU memory cannot be registered: %s: %s", call, cuda::name_of(driver, status));
  return {ErrorKind::kSystem, EIO, call, true};
}

// A failed copy is one line for the whole process: after an error CUDA fails every call of that context.
void report_failed_copy(const cuda::Driver& driver, cuda::Status status) {
  static std::atomic<bool> is_reported{false};
  if (is_reported.exchange(true)) return;
  VERBATIM_WARN(
      "a copy of GPU memory failed: %s. The work request fails; later failures are not reported. Next: check that the "
      "program frees no registered memory and that no kernel had an error (compute-sanitizer)",
      cuda::name_of(driver, status));
}

// Asking takes a lock of CUDA that threads need to queue copies.
constexpr std::uint64_t kAskIntervalNs = 1500;

template <typename Value>
bool get(const cuda::Driver& driver, cuda::PointerAttribute attribute, std::uint64_t address, Value& value) {
  return driver.pointer_get_attribute(&value, attribute, address) == cuda::kSuccess;
}

}  // namespace

std::optional<GpuAllocation> find_gpu_allocation(std::uint64_t address) {
  const cuda::Driver* const driver = cuda::driver();
  if (driver == nullptr) return std::nullopt;
  unsigned type = 0;
  int gpu = 0;
  cuda::Address start = 0;
  std::size_t bytes = 0;
  unsigned long long id = 0;
  if (!get(*driver, cuda::kMemoryType, address, type) || type != cuda::kDeviceMemory ||
      !get(*driver, cuda::kDeviceOrdinal, address, gpu) || gpu < 0 || gpu >= static_cast<int>(kMaxGpus) ||
      !get(*driver, cuda::kRangeStart, address, start) || !get(*driver, cuda::kRangeSize, address, bytes) ||
      !get(*driver, cuda::kBufferId, address, id)) {
    return std::nullopt;
  }
  return GpuAllocation{static_cast<std::uint32_t>(gpu), start, bytes, id};
}

std::optional<GpuAllocation> find_gpu_allocation(std::uint64_t address, std::size_t length) {
  constexpr std::size_t kAlignment = 256;  // of allocations
  constexpr std::size_t kSearched = 4096;
  if (cuda::driver() == nullptr) return std::nullopt;
  for (std::size_t offset = 0; offset < std::min(length, kSearched); offset += kAlignment) {
    if (std::optional<GpuAllocation> found = find_gpu_allocation(address + offset)) return found;
  }
  return std::nullopt;
}

Gpu* Gpu::opened(std::uint32_t number) {
  return g_gpus[number].load(std::memory_order_acquire);
}

Result<Gpu*> Gpu::open(std::uint32_t number) {
  if (Gpu* gpu = opened(number); gpu != nullptr) return gpu;
  static Mutex mutex;
  MutexLock lock(mutex);
  if (Gpu* gpu = opened(number); gpu != nullptr) return gpu;
  const cuda::Driver* const driver = cuda::driver();
  if (driver == nullptr) return system_error("dlopen of libcuda", EIO);
  cuda::Context context = nullptr;
  if (const cuda::Status status = driver->primary_context_retain(&context, static_cast<int>(number));
      status != cuda::kSuccess) {
    return refused("cuDevicePrimaryCtxRetain", *driver, status);
  }
  std::unique_ptr<Gpu> gpu(new Gpu(*driver, context));
  if (const cuda::Status status = driver->context_push(context); status != cuda::kSuccess) {
    return refused("cuCtxPushCurrent", *driver, status);
  }
  const Status prepared = gpu->prepare();
  cuda::Context popped = nullptr;
  driver->context_pop(&popped);
  if (!prepared) return prepared.error();
  g_gpus[number].store(gpu.get(), std::memory_order_release);
  return gpu.release();
}

void Gpu::forget_those_of_parent() {
  for (std::atomic<Gpu*>& gpu : g_gpus) keep_inherited(gpu.exchange(nullptr, std::memory_order_relaxed));
}

Status Gpu::prepare() {
  for (auto& lanes : streams_) {
    for (cuda::Stream& stream : lanes) {
      const cuda::Status status = cuda_.stream_create(&stream, cuda::kNonBlockingStream);
      if (status != cuda::kSuccess) return refused("cuStreamCreate", cuda_, status);
    }
  }
  MutexLock lock(mutex_);
  for (std::uint32_t i = 0; i < kEvents; ++i) {
    cuda::Event event = nullptr;
    if (const cuda::Status status = cuda_.event_create(&event, cuda::kEventWithoutTiming); status != cuda::kSuccess) {
      return refused("cuEventCreate", cuda_, status);
    }
    events_.push_back(event);
  }
  return {};
}

cuda::Event Gpu::take_event() {
  MutexLock lock(mutex_);
  if (events_.empty()) return nullptr;
  cuda::Event event = events_.back();
  events_.pop_back();
  return event;
}

void Gpu::return_event(cuda::Event event) {
  MutexLock lock(mutex_);
  events_.push_back(event);
}

CurrentGpu::CurrentGpu(const Gpu& gpu) : cuda_(gpu.cuda()) {
  if (!t_keeps_context) {
    exchange_capture_mode(cuda_, capture_mode_);
    is_set_ = is_pushed_ = cuda_.context_push(gpu.context()) == cuda::kSuccess;
    return;
  }
  if (t_kept_context == nullptr) exchange_capture_mode(cuda_, capture_mode_);
  is_set_ = t_kept_context == gpu.context() || cuda_.context_set_current(gpu.context()) == cuda::kSuccess;
  if (is_set_) t_kept_context = gpu.context();
}

CurrentGpu::~CurrentGpu() {
  cuda::Context popped = nullptr;
  if (is_pushed_) cuda_.context_pop(&popped);
  if (!t_keeps_context) exchange_capture_mode(cuda_, capture_mode_);
}

void CurrentGpu::keep_in_this_thread() {
  t_keeps_context = true;
}

GpuTransfer::GpuTransfer(GpuTransfer&& other) noexcept
    : gpu_(std::exchange(other.gpu_, nullptr)),
      event_(std::exchange(other.event_, nullptr)),
      stream_(other.stream_),
      asked_ns_(other.asked_ns_),
      state_(std::exchange(other.state_, State::kNone)) {}

GpuTransfer::~GpuTransfer() {
  finish(state_);
}

bool GpuTransfer::is_queued(Gpu& gpu, cuda::Status status) {
  if (status != cuda::kSuccess) report_failed_copy(gpu.cuda(), status);
  return status == cuda::kSuccess;
}

cuda::Event GpuTransfer::begin(Gpu& gpu) {
  gpu_ = &gpu;
  return gpu.take_event();
}

void GpuTransfer::end(cuda::Event event, cuda::Stream queued_in, cuda::Status status) {
  event_ = event;
  stream_ = queued_in;
  if (status == cuda::kSuccess) status = gpu_->cuda().event_record(event, queued_in);
  if (status == cuda::kSuccess) {
    state_ = State::kRunning;
    return;
  }
  report_failed_copy(gpu_->cuda(), status);
  finish(State::kFailed);
}

GpuTransfer::State GpuTransfer::poll() {
  if (state_ != State::kRunning) return state_;
  const std::uint64_t now = monotonic_ns();
  if (now - asked_ns_ < kAskIntervalNs) return state_;
  asked_ns_ = now;
  const CurrentGpu current(*gpu_);
  const cuda::Status status = current.is_set() ? gpu_->cuda().event_query(event_) : kContextIsGone;
  if (status == cuda::kNotReady) return state_;
  if (status != cuda::kSuccess) report_failed_copy(gpu_->cuda(), status);
  finish(status == cuda::kSuccess ? State::kDone : State::kFailed);
  return state_;
}

void GpuTransfer::finish(State state) {
  if (event_ != nullptr) gpu_->return_event(event_);
  event_ = nullptr;
  state_ = state;
}

}  // namespace verbatim::softverbs
