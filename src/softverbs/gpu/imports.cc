#include "softverbs/gpu/imports.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "softverbs/gpu/cuda_driver.h"
#include "softverbs/gpu/exports.h"
#include "softverbs/host/device_thread.h"
#include "softverbs/host/inherited.h"
#include "softverbs/host/with_memory.h"

namespace verbatim::softverbs {
namespace {

// How long a mapping may stay after its owner has withdrawn the memory or has died.
constexpr std::chrono::milliseconds kSweepInterval{100};

struct Key {
  Incarnation owner;
  std::uint32_t number;
  std::uint64_t serial;
  std::uint32_t gpu;
  auto operator<=>(const Key&) const = default;
};

// How a piece of GPU memory was mapped; the destructor undoes it.
struct Mapped : ReachableMemory {
  enum class Kind { kAccessible, kIpc, kVirtual };

  Mapped(const Gpu& mapping_gpu, Kind mapped_kind, std::uint64_t owners_start, std::uint64_t start, std::size_t bytes)
      : ReachableMemory(owners_start, start, bytes), gpu(mapping_gpu), kind(mapped_kind) {}
  ~Mapped() override {
    const CurrentGpu current(gpu);
    if (kind == Kind::kIpc) gpu.cuda().ipc_close_handle(start());
    if (kind != Kind::kVirtual) return;
    gpu.cuda().memory_unmap(start(), bytes());
    gpu.cuda().address_free(start(), bytes());
  }

  const Gpu& gpu;
  const Kind kind;
};

std::shared_ptr<Mapped> map_handle(const Gpu& gpu, std::uint32_t number, cuda::AllocationHandle handle,
                                   const GpuMemoryHandle& memory) {
  const cuda::Driver& driver = gpu.cuda();
  cuda::Address start = 0;
  if (driver.address_reserve(&start, memory.bytes, 0, 0, 0) != cuda::kSuccess) return nullptr;
  if (driver.memory_map(start, memory.bytes, 0, handle, 0) == cuda::kSuccess) {
    const cuda::AccessDescription access{{cuda::kDeviceLocation, static_cast<int>(number)}, cuda::kReadWrite};
    if (driver.memory_set_access(start, memory.bytes, &access, 1) == cuda::kSuccess) {
      return std::make_shared<Mapped>(gpu, Mapped::Kind::kVirtual, memory.start, start, memory.bytes);
    }
    driver.memory_unmap(start, memory.bytes);
  }
  driver.address_free(start, memory.bytes);
  return nullptr;
}

// Memory of this process on another of its GPUs.
std::shared_ptr<Mapped> reach_own(const Gpu& gpu, std::uint32_t number, const GpuMemoryHandle& memory) {
  const cuda::Driver& driver = gpu.cuda();
  if (memory.kind == GpuMemoryKind::kIpcHandle) {
    const Gpu* const other = Gpu::opened(memory.gpu);
    int is_possible = 0;
    if (other == nullptr ||
        driver.device_can_access_peer(&is_possible, static_cast<int>(number), static_cast<int>(memory.gpu)) !=
            cuda::kSuccess ||
        is_possible == 0) {
      return nullptr;
    }
    const cuda::Status status = driver.context_enable_peer_access(other->context(), 0);
    if (status != cuda::kSuccess && status != cuda::kPeerAccessAlreadyEnabled) return nullptr;
    return std::make_shared<Mapped>(gpu, Mapped::Kind::kAccessible, memory.start, memory.start, memory.bytes);
  }
  cuda::AllocationHandle handle = 0;
  if (driver.memory_retain_handle(&handle, reinterpret_cast<void*>(memory.start)) != cuda::kSuccess) return nullptr;
  std::shared_ptr<Mapped> mapped = map_handle(gpu, number, handle, memory);
  driver.memory_release(handle);
  return mapped;
}

UniqueFd descriptor_of(pid_t pid, int fd) {
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process) return {};
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_getfd, process.get(), fd, 0)));
}

std::shared_ptr<Mapped> reach_peer(const Gpu& gpu, std::uint32_t number, const ProcessView& owner,
                                   const GpuMemoryHandle& memory) {
  const cuda::Driver& driver = gpu.cuda();
  if (memory.kind == GpuMemoryKind::kIpcHandle) {
    cuda::IpcHandle handle{};
    std::memcpy(handle.bytes, memory.handle, sizeof handle.bytes);
    cuda::Address start = 0;
    if (driver.ipc_open_handle(&start, handle, cuda::kLazyPeerAccess) != cuda::kSuccess) return nullptr;
    return std::make_shared<Mapped>(gpu, Mapped::Kind::kIpc, memory.start, start, memory.bytes);
  }
  // Descriptors of a process in another PID namespace cannot be opened: its pid means nothing here.
  const UniqueFd fd = owner.shares_pid_namespace() ? descriptor_of(owner.pid(), memory.fd) : UniqueFd();
  if (!fd) return nullptr;
  cuda::AllocationHandle handle = 0;
  if (driver.memory_import(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get())),
                           cuda::kPosixDescriptor) != cuda::kSuccess) {
    return nullptr;
  }
  std::shared_ptr<Mapped> mapped = map_handle(gpu, number, handle, memory);
  driver.memory_release(handle);
  return mapped;
}

class Importer {
 public:
  std::shared_ptr<const ReachableMemory> find(const ProcessView& owner, std::uint32_t number, std::uint32_t gpu)
      VERBATIM_EXCLUDES(mutex_) {
    const std::uint64_t serial = owner.segment().gpu_memories[number - 1].serial.load(std::memory_order_acquire);
    if (serial == 0) return nullptr;
    const Key key{owner.incarnation(), number, serial, gpu};
    const MutexLock lock(mutex_);
    if (const auto known = entries_.find(key); known != entries_.end()) return known->second.memory;
    wanted_.push_back(key);  // first: one without an entry is ignored
    entries_.emplace(key, Entry{owner.shared_from_this(), nullptr});
    changed_.notify_one();
    return nullptr;
  }

  void run() {
    CurrentGpu::keep_in_this_thread();
    std::vector<std::shared_ptr<const Mapped>> withdrawn;
    for (;;) {
      wait(!withdrawn.empty());
      // Without memory a mapping is not made, or ends at the next turn.
      static_cast<void>(with_memory([&] {
        while (const std::optional<Wanted> wanted = next()) add(wanted->key, import(*wanted));
        take_withdrawn(withdrawn);
      }));
      // Copies may still use a mapping. It must end in this thread.
      std::erase_if(withdrawn, [](const std::shared_ptr<const Mapped>& memory) { return memory.use_count() <= 1; });
    }
  }

 private:
  struct Entry {
    std::shared_ptr<const ProcessView> owner;
    std::shared_ptr<const Mapped> memory;  // nullptr: not reachable, or not known yet
  };
  struct Wanted {
    Key key;
    std::shared_ptr<const ProcessView> owner;
  };

  void wait(bool has_withdrawn) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    if (!wanted_.empty()) return;
    if (entries_.empty() && !has_withdrawn) {
      changed_.wait(mutex_);
    } else {
      changed_.wait_for(mutex_, kSweepInterval);
    }
  }

  std::optional<Wanted> next() VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    if (wanted_.empty()) return std::nullopt;
    const Key key = wanted_.back();
    wanted_.pop_back();
    const auto entry = entries_.find(key);
    return Wanted{key, entry != entries_.end() ? entry->second.owner : nullptr};
  }

  void add(const Key& key, std::shared_ptr<const Mapped> memory) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    const auto entry = entries_.find(key);
    if (entry != entries_.end()) entry->second.memory = std::move(memory);
  }

  static std::shared_ptr<const Mapped> import(const Wanted& wanted) {
    const Key& key = wanted.key;
    if (!wanted.owner) return nullptr;  // it has withdrawn the memory
    const ProcessView& owner = *wanted.owner;
    const Gpu* const gpu = Gpu::opened(key.gpu);
    if (gpu == nullptr) return nullptr;
    const std::optional<GpuMemoryHandle> memory = exported_gpu_memory(owner.segment(), key.number, key.serial);
    if (!memory) return nullptr;
    const CurrentGpu current(*gpu);
    if (!current.is_set()) return nullptr;
    return owner.is_own() ? reach_own(*gpu, key.gpu, *memory) : reach_peer(*gpu, key.gpu, owner, *memory);
  }

  // Moves the mappings of memory that its owner has withdrawn, or whose owner has died.
  void take_withdrawn(std::vector<std::shared_ptr<const Mapped>>& withdrawn) VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    std::erase_if(entries_, [&](auto& entry) {
      const ProcessView& owner = *entry.second.owner;
      const SharedGpuMemory& shared = owner.segment().gpu_memories[entry.first.number - 1];
      if (owner.is_alive(monotonic_ns()) && shared.serial.load(std::memory_order_relaxed) == entry.first.serial) {
        return false;
      }
      if (entry.second.memory) withdrawn.push_back(std::move(entry.second.memory));
      return true;
    });
  }

  Mutex mutex_;
  std::condition_variable_any changed_;
  std::map<Key, Entry> entries_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<Key> wanted_ VERBATIM_GUARDED_BY(mutex_);
};

Mutex g_start_mutex;
std::atomic<Importer*> g_importer{nullptr};  // lives as long as its thread: until the end of the process

void* run_importer(void* importer) {
  static_cast<Importer*>(importer)->run();
  return nullptr;
}

}  // namespace

std::shared_ptr<const ReachableMemory> find_reachable(const ProcessView& owner, std::uint32_t number,
                                                      std::uint32_t gpu) {
  Importer* const importer = g_importer.load(std::memory_order_acquire);
  return importer != nullptr && number != 0 ? importer->find(owner, number, gpu) : nullptr;
}

Status start_importer() {
  const MutexLock lock(g_start_mutex);
  if (g_importer.load(std::memory_order_relaxed) != nullptr) return {};
  auto* const importer = new Importer;
  if (const int error = start_thread("softverbs-map", run_importer, importer); error != 0) {
    delete importer;
    return system_error("pthread_create", error);
  }
  g_importer.store(importer, std::memory_order_release);
  return {};
}

void forget_imports_of_parent() {
  keep_inherited(g_importer.exchange(nullptr, std::memory_order_relaxed));
}

}  // namespace verbatim::softverbs
