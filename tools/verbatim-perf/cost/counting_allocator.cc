// Preloaded into a measuring process. Forwards every allocation to the C library and counts the bytes of those that one
// object requests, recognised by the return address. Allocations made before allocations_watch() are not counted.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

// The C library's own functions, under the names that remain accessible when this file defines malloc and the others.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* old, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
void __libc_free(void* memory);
}

namespace {

std::atomic<std::uintptr_t> g_begin{0};
std::atomic<std::uintptr_t> g_end{0};
std::atomic<std::int64_t> g_bytes{0};

// The watched object's allocations by address; hash table with open addressing. The pages are zero until they are used.
struct Entry {
  std::uintptr_t address;
  std::size_t bytes;
};
constexpr std::size_t kEntries = std::size_t{1} << 20;
constexpr std::uintptr_t kDeleted = 1;
Entry g_entries[kEntries];
std::atomic_flag g_lock = ATOMIC_FLAG_INIT;

class Lock {
 public:
  Lock() {
    while (g_lock.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Lock() { g_lock.clear(std::memory_order_release); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

std::size_t slot_of(std::uintptr_t address) {
  return (address * 0x9e3779b97f4a7c15U >> 32) % kEntries;
}

void* account(void* memory, std::size_t bytes, const void* caller) {
  const auto from = reinterpret_cast<std::uintptr_t>(caller);
  if (memory == nullptr || from < g_begin.load(std::memory_order_relaxed) ||
      from >= g_end.load(std::memory_order_relaxed)) {
    return memory;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const Lock lock;
  std::size_t slot = slot_of(address);
  for (std::size_t tries = 0; g_entries[slot].address > kDeleted; ++tries) {
    if (tries == kEntries) std::abort();
    slot = (slot + 1) % kEntries;
  }
  g_entries[slot] = {address, bytes};
  g_bytes.fetch_add(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  return memory;
}

void forget(const void* memory) {
  if (memory == nullptr || g_end.load(std::memory_order_relaxed) == 0) return;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const Lock lock;
  std::size_t slot = slot_of(address);
  for (std::size_t tries = 0; tries < kEntries && g_entries[slot].address != 0; ++tries) {
    if (g_entries[slot].address == address) {
      g_bytes.fetch_sub(static_cast<std::int64_t>(g_entries[slot].bytes), std::memory_order_relaxed);
      g_entries[slot].address = kDeleted;
      return;
    }
    slot = (slot + 1) % kEntries;
  }
}

void* require(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

#define CALLER __builtin_return_address(0)

extern "C" {

void allocations_watch(std::uintptr_t begin, std::uintptr_t end) {
  g_begin.store(begin);
  g_end.store(end);
}

std::int64_t allocations_bytes() {
  return g_bytes.load();
}

void* malloc(std::size_t bytes) {
  return account(__libc_malloc(bytes), bytes, CALLER);
}
void* calloc(std::size_t count, std::size_t bytes) {
  return account(__libc_calloc(count, bytes), count * bytes, CALLER);
}
void* realloc(void* old, std::size_t bytes) {
  forget(old);  // before the realloc: another thread may get the freed address at once
  return account(__libc_realloc(old, bytes), bytes, CALLER);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  return account(__libc_memalign(alignment, bytes), bytes, CALLER);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return account(__libc_memalign(alignment, bytes), bytes, CALLER);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  void* const got = account(__libc_memalign(alignment, bytes), bytes, CALLER);
  if (got == nullptr) return ENOMEM;
  *memory = got;
  return 0;
}
void free(void* memory) {
  forget(memory);
  __libc_free(memory);
}

void* mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  const long got = ::syscall(SYS_mmap, address, bytes, protection, flags, fd, offset);
  if (got == -1) return MAP_FAILED;
  return account(reinterpret_cast<void*>(got), bytes, CALLER);
}
int munmap(void* memory, std::size_t bytes) noexcept {
  forget(memory);
  return static_cast<int>(::syscall(SYS_munmap, memory, bytes));
}

}  // extern "C"

// Without these, allocations that a shared C++ runtime makes for an object would count as the runtime's.
void* operator new(std::size_t bytes) {
  return account(require(__libc_malloc(bytes == 0 ? 1 : bytes)), bytes, CALLER);
}
void* operator new[](std::size_t bytes) {
  return account(require(__libc_malloc(bytes == 0 ? 1 : bytes)), bytes, CALLER);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return account(require(__libc_memalign(static_cast<std::size_t>(alignment), bytes)), bytes, CALLER);
}
void operator delete(void* memory) noexcept {
  free(memory);
}
void operator delete[](void* memory) noexcept {
  free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  free(memory);
}
