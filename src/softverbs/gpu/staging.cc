#include "softverbs/gpu/staging.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <deque>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "softverbs/gpu/gpu.h"
#include "softverbs/host/device_thread.h"
#include "softverbs/host/inherited.h"
#include "softverbs/host/with_memory.h"

namespace verbatim::softverbs {
namespace {

Mutex g_prepare_mutex;
std::atomic<bool> g_is_prepared{false};

// Of the buffers that wait for one owner of GPU memory. It may be stopped, and the others need some.
constexpr std::uint32_t kMaxBuffersOfOwner = kStagingBuffers / 2;
constexpr std::uint32_t kKeptBuffers = 8;  // of both limits, for copies that are waited for
constexpr std::uint32_t kDistance = 16;    // between the places where processes begin to search

// How long the thread polls for requests before it sleeps: about the time that it takes to wake it.
constexpr std::uint64_t kIdleSpinNs = 50'000;

bool change(StagingBuffer& buffer, std::uint32_t serial, StagingState from, StagingState to) {
  StagingWord expected{serial, from};
  return buffer.word.compare_exchange_strong(expected, {serial, to}, std::memory_order_acq_rel);
}

void free_buffer(StagingBuffer& buffer) {
  buffer.user.store(0, std::memory_order_release);
}

// Copies between the buffers and the GPU memory of this process, for peers. It takes no lock that a peer holds.
class GpuCopier {
 public:
  GpuCopier(const HostRegistry& registry, SharedGpuCopier& shared) : registry_(registry), shared_(shared) {}

  void run() {
    CurrentGpu::keep_in_this_thread();
    std::uint64_t idle_since = monotonic_ns();
    for (;;) {
      const std::uint32_t wake_count = shared_.wake_counter.load(std::memory_order_seq_cst);
      bool has_begun = false;
      const bool has_memory = with_memory([&] {
        has_begun = begin_requested();
        end_copied();
      });
      if (has_begun || !copies_.empty() || !has_memory) {
        idle_since = monotonic_ns();
      } else if (monotonic_ns() - idle_since < kIdleSpinNs) {
        sched_yield();
      } else {
        sleep(wake_count);
        idle_since = monotonic_ns();
      }
    }
  }

 private:
  struct Copy {
    Copy(StagingBuffer* taken, std::uint32_t number) : buffer(taken), serial(number) {}

    StagingBuffer* buffer;
    std::uint32_t serial;
    GpuTransfer transfer;
    bool has_ended = false;
  };

  void sleep(std::uint32_t wake_count) {
    shared_.sleeping.store(1, std::memory_order_seq_cst);
    if (shared_.tail.load(std::memory_order_seq_cst) == shared_.head.load(std::memory_order_relaxed)) {
      ::syscall(SYS_futex, &shared_.wake_counter, FUTEX_WAIT, wake_count, nullptr, nullptr, 0);
    }
    shared_.sleeping.store(0, std::memory_order_relaxed);
  }

  bool begin_requested() {
    bool has_begun = false;
    std::uint32_t head = shared_.head.load(std::memory_order_relaxed);
    while (head != shared_.tail.load(std::memory_order_acquire) && begin(shared_.ring[head % kGpuCopyRequests])) {
      shared_.head.store(++head, std::memory_order_release);
      has_begun = true;
    }
    return has_begun;
  }

  // False: no event is free; the request stays in the queue.
  bool begin(const GpuCopyRequest& request) {
    // Before anything changes: it may throw.
    Copy& copy = copies_.emplace_back(&registry_.gpu_staging().buffers[request.buffer], request.serial);
    if (!change(*copy.buffer, request.serial, StagingState::kRequested, StagingState::kCopying)) {
      copy.has_ended = true;  // it was cancelled
      return true;
    }
    // Orders this copy behind what earlier users did with the buffer, also for ThreadSanitizer, which does not see the
    // order that other processes make.
    static_cast<void>(copy.buffer->user.load(std::memory_order_acquire));
    std::byte* const bytes = registry_.staging_bytes(request.buffer);
    const std::uint64_t address = cuda_address(request.address);
    Gpu* const gpu = Gpu::opened(gpu_of(request.address));
    const CopyWay way = request.is_read != 0 ? CopyWay::kToHost : CopyWay::kFromHost;
    if (gpu == nullptr) {
      end(copy, StagingState::kCopyFailed);
    } else if (!copy.transfer.start(*gpu, way, request.lane, [&](const cuda::Driver& cuda, cuda::Stream stream) {
                 return request.is_read != 0 ? cuda.copy_to_host(bytes, address, request.bytes, stream)
                                             : cuda.copy_to_device(address, bytes, request.bytes, stream);
               })) {
      if (!change(*copy.buffer, copy.serial, StagingState::kCopying, StagingState::kRequested)) {
        end(copy, StagingState::kCopyFailed);  // it was abandoned
      }
      copies_.pop_back();
      return false;
    }
    return true;
  }

  void end_copied() {
    running_.clear();
    for (Copy& copy : copies_) {
      if (copy.has_ended || std::find(running_.begin(), running_.end(), copy.transfer.stream()) != running_.end()) {
        continue;
      }
      const GpuTransfer::State state = copy.transfer.poll();
      if (state == GpuTransfer::State::kRunning) {
        running_.push_back(copy.transfer.stream());
        continue;
      }
      end(copy, state == GpuTransfer::State::kDone ? StagingState::kCopied : StagingState::kCopyFailed);
    }
    for (; !copies_.empty() && copies_.front().has_ended; copies_.pop_front()) {
      shared_.ended.fetch_add(1, std::memory_order_release);
    }
  }

  static void end(Copy& copy, StagingState result) {
    copy.has_ended = true;
    if (change(*copy.buffer, copy.serial, StagingState::kCopying, result)) return;
    if (change(*copy.buffer, copy.serial, StagingState::kAbandoned, StagingState::kIdle)) free_buffer(*copy.buffer);
  }

  const HostRegistry& registry_;
  SharedGpuCopier& shared_;
  std::deque<Copy> copies_;
  std::vector<cuda::Stream> running_;  // of end_copied()
};

std::atomic<GpuCopier*> g_copier{nullptr};  // lives as long as its thread: until the end of the process

void* run_gpu_copier(void* copier) {
  static_cast<GpuCopier*>(copier)->run();
  return nullptr;
}

Status start_copier(const HostRegistry& registry, SharedGpuCopier& shared) {
  auto* const copier = new GpuCopier(registry, shared);
  if (const int error = start_thread("softverbs-gpu", run_gpu_copier, copier); error != 0) {
    delete copier;
    return system_error("pthread_create", error);
  }
  g_copier.store(copier, std::memory_order_relaxed);
  shared.ready.store(1, std::memory_order_release);
  return {};
}

void wake_copier(SharedGpuCopier& shared) {
  shared.wake_counter.fetch_add(1, std::memory_order_seq_cst);
  if (shared.sleeping.load(std::memory_order_seq_cst) == 0) return;
  ::syscall(SYS_futex, &shared.wake_counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A user that died has left its buffers taken. A buffer is free again when nobody will access it.
bool is_left(const HostRegistry& registry, const StagingBuffer& buffer, Incarnation user) {
  const StagingState state = buffer.word.load(std::memory_order_acquire).state;
  if (state == StagingState::kAbandoned || registry.is_alive(user)) return false;
  const bool is_asked = state == StagingState::kRequested || state == StagingState::kCopying;
  return !is_asked || !registry.is_alive(buffer.copier.load(std::memory_order_relaxed));
}

// The process that was asked to copy frees a buffer that its user does not wait for. If that process died, others do.
void free_if_abandoned_to_dead(const HostRegistry& registry, StagingBuffer& buffer) {
  const StagingWord word = buffer.word.load(std::memory_order_acquire);
  if (word.state != StagingState::kAbandoned || registry.is_alive(buffer.copier.load(std::memory_order_relaxed)))
    return;
  if (change(buffer, word.serial, StagingState::kAbandoned, StagingState::kIdle)) free_buffer(buffer);
}

// Frees what dead processes have left.
void reclaim(const HostRegistry& registry) {
  for (StagingBuffer& buffer : registry.gpu_staging().buffers) {
    free_if_abandoned_to_dead(registry, buffer);
    Incarnation user = buffer.user.load(std::memory_order_relaxed);
    // Others may do the same; numbers of processes are not used again.
    if (user != 0 && is_left(registry, buffer, user)) buffer.user.compare_exchange_strong(user, 0);
  }
}

struct Use {
  std::uint32_t all = 0;
  std::uint32_t of_owner = 0;
};

Use count_taken(const HostRegistry& registry, Incarnation owner) {
  Use use;
  for (const StagingBuffer& buffer : registry.gpu_staging().buffers) {
    if (buffer.user.load(std::memory_order_relaxed) == 0) continue;
    ++use.all;
    if (buffer.copier.load(std::memory_order_relaxed) == owner) ++use.of_owner;
  }
  return use;
}

// Whether a process is alive costs a system call, and usually all users of the buffers are.
bool may_reclaim() {
  static std::atomic<std::uint64_t> last_ns{0};
  const std::uint64_t now = monotonic_ns();
  if (now - last_ns.load(std::memory_order_relaxed) < kNanosecondsPerMillisecond) return false;
  last_ns.store(now, std::memory_order_relaxed);
  return true;
}

}  // namespace

Status prepare_staging(const HostRegistry& registry, Segment& segment) {
  if (g_is_prepared.load(std::memory_order_acquire)) return {};
  MutexLock lock(g_prepare_mutex);
  if (g_is_prepared.load(std::memory_order_relaxed)) return {};
  const cuda::Driver* const driver = cuda::driver();
  if (driver == nullptr) return system_error("dlopen of libcuda", EIO);
  if (Status backed = registry.back_staging(); !backed) return backed;
  const cuda::Status pinned =
      driver->host_register(registry.staging_bytes(0), kStagingBuffers * kStagingBytes, cuda::kPortableHostMemory);
  if (pinned != cuda::kSuccess && pinned != cuda::kHostMemoryAlreadyRegistered) {
    VERBATIM_WARN("GPU memory cannot be registered: cuMemHostRegister of %zu bytes: %s",
                  kStagingBuffers * kStagingBytes, cuda::name_of(*driver, pinned));
    return {Error{ErrorKind::kSystem, EIO, "cuMemHostRegister", true}};
  }
  if (Status started = start_copier(registry, segment.gpu_copier); !started) return started;
  g_is_prepared.store(true, std::memory_order_release);
  return {};
}

void forget_staging_of_parent() {
  g_is_prepared.store(false, std::memory_order_relaxed);
  keep_inherited(g_copier.exchange(nullptr, std::memory_order_relaxed));
}

TakenBuffer::~TakenBuffer() {
  if (registry_ == nullptr) return;
  // The owner of the GPU memory may put a request that it has begun back into the queue.
  while (!change(shared(), serial_, StagingState::kRequested, StagingState::kIdle)) {
    const StagingState state = shared().word.load(std::memory_order_acquire).state;
    if (state != StagingState::kRequested && state != StagingState::kCopying) break;
    // What it copies now it must not find in the hands of another process: it frees the buffer.
    if (change(shared(), serial_, StagingState::kCopying, StagingState::kAbandoned)) return;
  }
  free_buffer(shared());
}

TakenBuffer TakenBuffer::take(const HostRegistry& registry, Incarnation owner, bool is_waited_for) {
  const auto is_allowed = [&] {
    const Use use = count_taken(registry, owner);
    const std::uint32_t kept = is_waited_for ? 0 : kKeptBuffers;
    return use.all + kept < kStagingBuffers && (owner == 0 || use.of_owner + kept < kMaxBuffersOfOwner);
  };
  TakenBuffer taken;
  if (!is_allowed()) {
    if (!may_reclaim()) return taken;
    reclaim(registry);
    if (!is_allowed()) return taken;
  }
  for (std::uint32_t i = 0; i < kStagingBuffers; ++i) {
    const std::uint32_t index = (registry.me() * kDistance + i) % kStagingBuffers;
    StagingBuffer& buffer = registry.gpu_staging().buffers[index];
    Incarnation free = 0;
    if (!buffer.user.compare_exchange_strong(free, registry.me(), std::memory_order_acquire)) continue;
    buffer.copier.store(owner, std::memory_order_relaxed);
    taken.registry_ = &registry;
    taken.index_ = index;
    taken.serial_ = buffer.word.load(std::memory_order_relaxed).serial + 1;
    buffer.word.store({taken.serial_, StagingState::kIdle}, std::memory_order_release);
    return taken;
  }
  return taken;
}

bool TakenBuffer::request_copy(const ProcessView& owner, std::uint64_t address, std::uint32_t bytes, bool is_read,
                               std::uint32_t lane) {
  SharedGpuCopier& queue = owner.segment().gpu_copier;
  {
    SharedLockGuard lock(queue.lock, registry_->me());
    const std::uint32_t tail = queue.tail.load(std::memory_order_relaxed);
    if (tail - queue.head.load(std::memory_order_acquire) >= kGpuCopyRequests) return false;
    shared().word.store({++serial_, StagingState::kRequested}, std::memory_order_relaxed);
    queue.ring[tail % kGpuCopyRequests] = {address, bytes, index_, serial_, is_read ? 1U : 0U, lane};
    queue.tail.store(tail + 1, std::memory_order_seq_cst);
  }
  wake_copier(queue);
  return true;
}

TakenBuffer::Progress TakenBuffer::poll(const ProcessView& owner) const {
  switch (shared().word.load(std::memory_order_acquire).state) {
    case StagingState::kCopied:
      return Progress::kDone;
    case StagingState::kCopyFailed:
      return Progress::kFailed;
    default:
      return owner.is_alive(monotonic_ns()) ? Progress::kRunning : Progress::kOwnerDead;
  }
}

void await_requested_copies(Segment& segment) {
  SharedGpuCopier& shared = segment.gpu_copier;
  if (shared.ready.load(std::memory_order_acquire) == 0) return;
  const std::uint32_t end = shared.tail.load(std::memory_order_acquire);
  while (static_cast<std::int32_t>(shared.ended.load(std::memory_order_acquire) - end) < 0) {
    wake_copier(shared);  // the sender may have died before it did so
    sched_yield();
  }
}

}  // namespace verbatim::softverbs
