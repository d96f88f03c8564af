#include "softverbs/gpu/exports.h"

#include <fcntl.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>

#include "base/unique_fd.h"
#include "softverbs/host/inherited.h"

namespace verbatim::softverbs {
namespace {

struct Export {
  std::uint64_t id;
  std::uint32_t users;
  UniqueFd fd;
};

struct Exports {
  Mutex mutex;
  std::map<std::uint32_t, Export> by_index VERBATIM_GUARDED_BY(mutex);
  std::uint64_t last_serial VERBATIM_GUARDED_BY(mutex) = 0;

  std::uint32_t free_index() const VERBATIM_REQUIRES(mutex) {
    std::uint32_t index = 0;
    while (by_index.contains(index)) ++index;
    return index;
  }
};

// Made at the first export, because a forked child may have no memory for a new one. Never destroyed: destructors of
// the program may still deregister memory.
std::atomic<Exports*> g_exports{nullptr};

Exports& made_exports() {
  Exports* known = g_exports.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  auto made = std::make_unique<Exports>();
  return g_exports.compare_exchange_strong(known, made.get(), std::memory_order_acq_rel) ? *made.release() : *known;
}

// Fills in how peers map the memory. False: it cannot be exported.
bool describe(const cuda::Driver& driver, const GpuAllocation& allocation, GpuMemoryHandle& memory, UniqueFd& fd) {
  int is_legacy = 0;
  if (driver.pointer_get_attribute(&is_legacy, cuda::kIsLegacyIpcCapable, allocation.start) == cuda::kSuccess &&
      is_legacy != 0) {
    memory.kind = GpuMemoryKind::kIpcHandle;
    cuda::IpcHandle handle{};
    const cuda::Status status = driver.ipc_get_handle(&handle, allocation.start);
    std::memcpy(memory.handle, handle.bytes, sizeof memory.handle);
    return status == cuda::kSuccess;
  }
  unsigned long long types = 0;
  if (driver.pointer_get_attribute(&types, cuda::kAllowedHandleTypes, allocation.start) != cuda::kSuccess ||
      (types & cuda::kPosixDescriptor) == 0) {
    return false;
  }
  cuda::AllocationHandle handle = 0;
  if (driver.memory_retain_handle(&handle, reinterpret_cast<void*>(allocation.start)) != cuda::kSuccess) return false;
  int exported = -1;
  const cuda::Status status = driver.memory_export(&exported, handle, cuda::kPosixDescriptor, 0);
  driver.memory_release(handle);
  if (status != cuda::kSuccess) return false;
  fd = UniqueFd(exported);
  ::fcntl(exported, F_SETFD, FD_CLOEXEC);
  memory.kind = GpuMemoryKind::kDescriptor;
  memory.fd = exported;
  return true;
}

// A thread may be reading the last handle at the same time. If it reads a word of this one, the serial number that it
// reads next has changed, and it does not use what it has read.
void publish(SharedGpuMemory& shared, const GpuMemoryHandle& memory, std::uint64_t serial) {
  std::uint64_t words[SharedGpuMemory::kWords] = {};
  std::memcpy(words, &memory, sizeof memory);
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < SharedGpuMemory::kWords; ++i) shared.words[i].store(words[i], std::memory_order_relaxed);
  shared.serial.store(serial, std::memory_order_release);
}

}  // namespace

std::optional<GpuMemoryHandle> exported_gpu_memory(const Segment& segment, std::uint32_t number, std::uint64_t serial) {
  const SharedGpuMemory& shared = segment.gpu_memories[number - 1];
  std::uint64_t words[SharedGpuMemory::kWords];
  for (std::size_t i = 0; i < SharedGpuMemory::kWords; ++i) words[i] = shared.words[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (shared.serial.load(std::memory_order_relaxed) != serial) return std::nullopt;
  GpuMemoryHandle memory;
  std::memcpy(&memory, words, sizeof memory);
  return memory;
}

std::uint32_t export_gpu_memory(Segment& segment, const GpuAllocation& allocation) {
  Exports& exports = made_exports();
  const MutexLock lock(exports.mutex);
  for (auto& [index, known] : exports.by_index) {
    if (known.id != allocation.id) continue;
    ++known.users;
    return index + 1;
  }
  const std::uint32_t index = exports.free_index();
  Gpu* const gpu = Gpu::opened(allocation.gpu);
  if (index >= kMaxGpuMemories || gpu == nullptr) return 0;
  const CurrentGpu current(*gpu);
  GpuMemoryHandle memory{};
  UniqueFd fd;
  if (!describe(gpu->cuda(), allocation, memory, fd)) return 0;
  memory.gpu = allocation.gpu;
  memory.start = allocation.start;
  memory.bytes = allocation.bytes;
  exports.by_index.emplace(index, Export{allocation.id, 1, std::move(fd)});
  publish(segment.gpu_memories[index], memory, ++exports.last_serial);
  return index + 1;
}

void withdraw_gpu_memory(Segment& segment, std::uint32_t number) {
  Exports* const exports = g_exports.load(std::memory_order_acquire);
  if (number == 0 || exports == nullptr) return;
  const MutexLock lock(exports->mutex);
  const auto found = exports->by_index.find(number - 1);
  if (found == exports->by_index.end() || --found->second.users != 0) return;
  segment.gpu_memories[number - 1].serial.store(0, std::memory_order_release);
  exports->by_index.erase(found);
}

void forget_exports_of_parent() {
  // A thread of the parent may have held the lock, so the descriptors stay open until the child ends.
  keep_inherited(g_exports.exchange(nullptr, std::memory_order_acq_rel));
}

}  // namespace verbatim::softverbs
