// Calls for memory. Those that the plugin makes are counted, operator new's with them, because the plugin has a C++
// library of its own, which allocates with malloc. What the C library allocates for it is not.
#include <link.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

#include "simulation/memory.h"
#include "simulation/scheduler.h"
#include "support/next_function.h"

namespace simulation {
namespace {

struct Code {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

// The thread with the turn changes them.
Code g_plugin;
long g_left = 0;  // calls until the one that is refused; 0: none will be
bool g_refused = false;

bool is_refused(const char* call, const void* caller) {
  if (g_left == 0 || !is_simulated()) return false;
  const auto address = reinterpret_cast<std::uintptr_t>(caller);
  if (address < g_plugin.begin || address >= g_plugin.end || --g_left != 0) return false;
  g_refused = true;
  record(call, -ENOMEM);
  errno = ENOMEM;
  return true;
}

}  // namespace

void refuse_memory(const std::string& path, long nth) {
  struct Search {
    const std::string& path;
    Code found;
  } search{path, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* argument) {
        auto& [wanted, found] = *static_cast<Search*>(argument);
        if (wanted != info->dlpi_name) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
          found = {info->dlpi_addr + segment.p_vaddr, info->dlpi_addr + segment.p_vaddr + segment.p_memsz};
        }
        return 1;
      },
      &search);
  if (search.found.end == 0) fail_run("the plugin whose memory is to be refused is not loaded");
  g_plugin = search.found;
  g_refused = false;
  g_left = nth;
}

bool has_refused_memory() {
  return g_refused;
}

}  // namespace simulation

// Defined under other C++ names, because the headers of the C library declare them with other specifiers.
#define MEMORY_CALL(symbol, failed, parameters, original)                                                  \
  extern "C" __attribute__((visibility("default"))) void* interposed_##symbol parameters __asm__(#symbol); \
  void* interposed_##symbol parameters {                                                                   \
    return simulation::is_refused(#symbol, __builtin_return_address(0)) ? failed : original;               \
  }

// dlsym, which finds other originals, allocates.
extern "C" void* __libc_malloc(std::size_t bytes);
extern "C" void* __libc_calloc(std::size_t count, std::size_t bytes);
extern "C" void* __libc_realloc(void* block, std::size_t bytes);
extern "C" void* __libc_memalign(std::size_t alignment, std::size_t bytes);

MEMORY_CALL(malloc, nullptr, (std::size_t bytes), __libc_malloc(bytes))
MEMORY_CALL(calloc, nullptr, (std::size_t count, std::size_t bytes), __libc_calloc(count, bytes))
MEMORY_CALL(realloc, nullptr, (void* block, std::size_t bytes), __libc_realloc(block, bytes))
MEMORY_CALL(aligned_alloc, nullptr, (std::size_t alignment, std::size_t bytes), __libc_memalign(alignment, bytes))

using MapMemory = void* (*)(void* address, std::size_t bytes, int protection, int flags, int fd, off64_t at);
static const auto next_mmap64 = verbatim::test::next_function<MapMemory>("mmap64");
MEMORY_CALL(mmap64, MAP_FAILED, (void* address, std::size_t bytes, int protection, int flags, int fd, off64_t at),
            next_mmap64(address, bytes, protection, flags, fd, at))
