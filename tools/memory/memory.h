// The memory that a rank sends from and receives into: host memory or the memory of a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "ranks/loaded_plugin.h"

namespace verbatim::memory {

enum class Kind : std::uint8_t { kHost, kCuda };
const char* kind_name(Kind kind);  // "host" or "cuda", as --memory takes it

// Of host memory. Copies by the CPU, as softverbs makes them, are up to 1.6 times as fast with huge pages (2 MiB).
enum class Pages : std::uint8_t { kHuge, kSmall };
const char* pages_name(Pages pages);  // "huge" or "small", as --pages takes it

// Pointers to GPU memory are device addresses, which the CPU must not dereference. One thread allocates; all other
// functions may be called from several threads at once.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  // The memory begins at a page boundary, is registered in whole or in part, and is freed by the destructor. Throws
  // Failure.
  std::byte* allocate(std::size_t bytes) {
    allocated_ += bytes;
    return do_allocate(bytes);
  }
  // The sum of all allocations.
  std::size_t allocated() const { return allocated_; }

  // Whether the CPU can access the memory. If not, a completed receive must be flushed (iflush) before its data is
  // read, as NCCL does.
  virtual bool is_host() const = 0;

  // Copies run in order. copy() is complete after finish(); the copies from and to the host when the call returns.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void upload(std::byte* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void finish() = 0;

  // The function of the plugin's table that registers this memory at a device: "regMr" or "regMrDmaBuf". Throws Failure
  // when the device does not support this memory.
  virtual const char* registered_by(const ranks::LoadedPlugin& plugin, int device) const = 0;
  // Registers a part of an allocation at a comm of a device and returns the handle. Throws Failure.
  virtual void* register_at(const ranks::LoadedPlugin& plugin, int device, void* comm, std::byte* data,
                            std::size_t bytes) const = 0;

  virtual std::string describe() const = 0;  // "host memory, huge pages", "GPU 0 of 2 (NVIDIA H100 80GB HBM3)"
  // Host memory: the process's peak resident set. GPU memory: the bytes that all processes use now.
  virtual std::size_t in_use() const = 0;

 private:
  virtual std::byte* do_allocate(std::size_t bytes) = 0;

  std::size_t allocated_ = 0;
};

// Without `pages` those that the kernel gives.
std::unique_ptr<Memory> make_host_memory(std::optional<Pages> pages = std::nullopt);
// What host memory of these pages is called: "host memory, huge pages".
std::string describe_host_memory(std::optional<Pages> pages);
// The memory that --memory names: of the host, or of GPU `rank` modulo the number of GPUs, through the CUDA driver
// library `cuda`. Throws Failure when there is no such library or GPU. It must be called before the plugin is loaded: a
// device in user space looks for CUDA in the process when it is opened.
std::unique_ptr<Memory> make_memory(Kind kind, const std::string& cuda, int rank,
                                    std::optional<Pages> pages = std::nullopt);
// Throws Failure when a device of the plugin does not support the memory.
void require_support(const Memory& memory, const ranks::LoadedPlugin& plugin);

}  // namespace verbatim::memory
