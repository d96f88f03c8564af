// The shared memory through which copies of GPU memory pass; part of the layout of the registry and of the segments.
// Processes with GPU memory have the buffers pinned, so that the copy engines of their GPUs reach them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "softverbs/host/settings.h"
#include "softverbs/host/shared_lock.h"

namespace verbatim::softverbs {

constexpr std::uint32_t kStagingBuffers = 128;
constexpr std::size_t kStagingBytes = 128 << 10;  // of one buffer: the size in which NCCL sends

// kRequested: the owner of GPU memory is to copy between it and the buffer. kCopying: it does. kCopied, kCopyFailed: it
// has, and will not access the buffer again. kAbandoned: it does, and the user does not wait for it any more.
enum class StagingState : std::uint32_t { kIdle, kRequested, kCopying, kCopied, kCopyFailed, kAbandoned };

// The state and the number of the request that it belongs to: a request that was cancelled stays in the owner's queue.
// Aligned, else clang calls libatomic for it.
struct alignas(8) StagingWord {
  std::uint32_t serial;
  StagingState state;
};

struct StagingBuffer {
  std::atomic<Incarnation> user;    // 0: free
  std::atomic<Incarnation> copier;  // the process that the user asks to copy; 0: none
  std::atomic<StagingWord> word;
};
static_assert(std::atomic<StagingWord>::is_always_lock_free);

// One for each device, if its atomics exclude only each other, as IBV_ATOMIC_HCA allows; else the first one for all.
using AtomicsLocks = std::array<SharedLock, kMaxDevices>;

// In the registry, for all processes.
struct GpuStaging {
  AtomicsLocks atomics_locks;  // serialize all RDMA atomics on GPU memory: several processes may reach one address
  StagingBuffer buffers[kStagingBuffers];
};

struct GpuCopyRequest {
  std::uint64_t address;  // of the GPU memory, as in SharedMr
  std::uint32_t bytes;
  std::uint32_t buffer;
  std::uint32_t serial;   // of the request
  std::uint32_t is_read;  // from the GPU memory to the buffer
  std::uint32_t lane;     // requests of one lane are executed in order
};

constexpr std::uint32_t kGpuCopyRequests = 256;  // a power of two, more than there are buffers

// In the segment of a process: what its thread for GPU memory is to copy for peers.
struct SharedGpuCopier {
  SharedLock lock;                          // taken by senders
  std::atomic<std::uint32_t> tail;          // next to write
  std::atomic<std::uint32_t> head;          // next to read; stored by the owner only
  std::atomic<std::uint32_t> ended;         // all requests before it have ended
  std::atomic<std::uint32_t> wake_counter;  // futex of the thread
  std::atomic<std::uint32_t> sleeping;
  std::atomic<std::uint32_t> ready;  // the thread runs
  GpuCopyRequest ring[kGpuCopyRequests];
};

enum class GpuMemoryKind : std::uint32_t { kIpcHandle, kDescriptor };

// How other processes map an allocation of GPU memory.
struct GpuMemoryHandle {
  GpuMemoryKind kind;
  std::uint32_t gpu;  // its number in the owner
  std::uint64_t start;
  std::uint64_t bytes;
  std::int32_t fd;  // of the owner
  char handle[64];  // of cuIpcGetMemHandle
};

constexpr std::uint32_t kMaxGpuMemories = 1024;

// An entry of the owner's allocations, which the next one uses again: gpu/exports.h writes and reads it. The serial
// number is 0 while no such memory is registered; the words of the handle change only then.
struct SharedGpuMemory {
  static constexpr std::size_t kWords = (sizeof(GpuMemoryHandle) + 7) / 8;

  std::atomic<std::uint64_t> serial;
  std::atomic<std::uint64_t> words[kWords];
};

// Copies of GPU memory that are under way for one QP. A region is not in use any more when what had begun has settled.
struct CopyProgress {
  std::atomic<std::uint32_t> begun;
  std::atomic<std::uint32_t> settled;
  std::atomic<Incarnation> copier;  // the process whose engine copies
};

}  // namespace verbatim::softverbs
