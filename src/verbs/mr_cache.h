// Memory registrations of one protection domain, shared by every communicator of the process: NCCL registers the same
// buffer once per connection and channel.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "base/result.h"
#include "verbs/handles.h"
#include "verbs/verbs.h"

namespace verbatim {

enum class MemoryType : std::uint8_t { kHost, kCuda, kDmaBuf };

// kStrict is for what the CPU polls or must see in order (CTS rings, completion records): never relaxed ordering.
// kAtomic: strict, and peers may use atomics on it; only where the device has them.
enum class MrOrdering : std::uint8_t { kRelaxed, kStrict, kAtomic };

// Any byte of a dma-buf. The fd is used during acquire() only. dma-bufs consist of whole pages: `offset` is where the
// address lies in it, or where the page of the address starts; only these two can be meant, and both are understood.
struct DmaBuf {
  int fd = -1;
  std::uint64_t offset = 0;
};

struct MrRequest {
  const void* address = nullptr;
  std::size_t bytes = 0;
  MemoryType type = MemoryType::kHost;
  MrOrdering ordering = MrOrdering::kRelaxed;
  DmaBuf dmabuf = {};                                 // for kDmaBuf
  bool (*suppress_log_for)(int sys_errno) = nullptr;  // refusals for which the caller has another way: not logged
  int dmabuf_errno = 0;                               // kCuda: why this is no dma-buf
};

// What a work request and a peer need. Remote addresses are the caller's virtual addresses (iova = address).
struct MrEntry {
  UniqueMr mr;
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
};

// A registration as messages show it.
struct MrRegion {
  MemoryType type = MemoryType::kHost;
  std::uintptr_t start = 0;
  std::size_t bytes = 0;
};

const char* memory_name(MemoryType type);

class MrCache;

struct MrReleaser {
  MrCache* cache = nullptr;
  void operator()(const MrEntry* entry) const;
};

// One reference to a registration: ref->lkey, ref->rkey, ref->mr. Dropping it releases it. Must not outlive the cache.
using MrRef = std::unique_ptr<const MrEntry, MrReleaser>;

class MrCache {
 public:
  // `relaxed_ordering`: ask for IBV_ACCESS_RELAXED_ORDERING (needs verbs.reg_mr_iova2). `device` is for messages.
  MrCache(const Verbs& verbs, ibv_pd* pd, const char* device, bool relaxed_ordering);
  ~MrCache();
  MrCache(const MrCache&) = delete;
  MrCache& operator=(const MrCache&) = delete;

  // A registration that covers [address, address + bytes), page-aligned: one that exists, of the same type, ordering
  // and (for a dma-buf) the same buffer at the same place, or a new one. Overlapping ranges are never merged. Zero
  // bytes answer keys of a page of our own, since no byte of the caller's memory may be touched. From any thread; no
  // lock is held while the driver registers. Failure is logged with what limits it and the remedy.
  Result<MrRef> acquire(const MrRequest& request) VERBATIM_EXCLUDES(mutex_);

  // Drops `ref` and answers what deregistration said, when it was the last reference.
  Status release(MrRef ref) VERBATIM_EXCLUDES(mutex_);

  // A registration that covers [address, address + bytes), whatever its kind: for messages.
  std::optional<MrRegion> find(std::uintptr_t address, std::size_t bytes) const VERBATIM_EXCLUDES(mutex_);

  // Live registrations.
  std::size_t size() const VERBATIM_EXCLUDES(mutex_);

 private:
  // Registrations that may stand for each other.
  struct RegistrationKind {
    MemoryType type;
    MrOrdering ordering;
    std::uint64_t buffer_device;  // identity of the dma-buf (fstat), 0 for other memory
    std::uint64_t buffer_inode;
    std::uint64_t buffer_base;  // virtual address of the dma-buf's byte 0
    auto operator<=>(const RegistrationKind&) const = default;
  };

  struct Slot;

  // Disjointness is not promised, so the map is ordered by start and searched downwards from the last start that fits;
  // `longest` ends the search.
  struct Ranges {
    std::multimap<std::uintptr_t, std::unique_ptr<Slot>> by_start;
    std::size_t max_bytes = 0;
  };

  struct Slot : MrEntry {
    std::size_t bytes = 0;
    std::size_t references = 0;
    std::map<RegistrationKind, Ranges>::iterator ranges;
    std::multimap<std::uintptr_t, std::unique_ptr<Slot>>::iterator position;
  };

  friend struct MrReleaser;

  Slot* find_cover(const RegistrationKind& key, std::uintptr_t start, std::size_t bytes) VERBATIM_REQUIRES(mutex_);
  Result<UniqueMr> register_range(const MrRequest& request, std::uintptr_t start, std::size_t bytes,
                                  std::uint64_t dmabuf_offset) const;
  Status drop(const MrEntry* entry) VERBATIM_EXCLUDES(mutex_);
  std::string describe_some() const VERBATIM_EXCLUDES(mutex_);

  const Verbs& verbs_;
  ibv_pd* const pd_;
  const char* const device_;
  const bool relaxed_ordering_;
  const std::size_t page_bytes_;
  const std::unique_ptr<std::byte, void (*)(void*)> zero_byte_page_;  // stands in for zero-byte registrations
  mutable Mutex mutex_;
  std::map<RegistrationKind, Ranges> ranges_ VERBATIM_GUARDED_BY(mutex_);
  std::size_t size_ VERBATIM_GUARDED_BY(mutex_) = 0;
};

}  // namespace verbatim
