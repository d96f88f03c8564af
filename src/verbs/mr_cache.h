// Memory registrations of one protection domain, shared by all communicators of the process, because NCCL registers the
// same buffer for each connection and channel.
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
#include "verbs/mlx5.h"
#include "verbs/verbs.h"

namespace verbatim {

enum class MemoryType : std::uint8_t { kHost, kCuda, kDmaBuf };

// kRelaxed: relaxed ordering if the device does it. kStrict: never relaxed ordering, for memory that the CPU polls or
// must read in order (CTS rings, completion records). kAtomic and kRelaxedAtomic: kStrict and kRelaxed with remote
// atomics, for devices that have them.
enum class MrOrdering : std::uint8_t { kRelaxed, kStrict, kAtomic, kRelaxedAtomic };

// The position of an address in a dma-buf. The fd is used during acquire() only. `offset` is either the offset of the
// address, or the offset of the start of its page. Both work, because a dma-buf consists of whole pages.
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
  bool data_direct = false;                           // kDmaBuf: through the Data Direct interface of the device
  bool (*suppress_log_for)(int sys_errno) = nullptr;  // errors after which the caller tries something else: not logged
  int dmabuf_errno = 0;                               // kCuda: the error of a registration as dma-buf before, or 0
};

// A registration and its keys. Remote addresses are virtual addresses of this process (iova = address).
struct MrEntry {
  UniqueMr mr;
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
};

// The range of a registration, for log lines.
struct MrRegion {
  MemoryType type = MemoryType::kHost;
  std::uintptr_t start = 0;
  std::size_t bytes = 0;
};

const char* memory_name(MemoryType type);

class MrCache;

struct MrReleaser {
  MrCache* cache = nullptr;
  bool has_whole_range = false;  // the reference is one to the whole range of the registration
  void operator()(const MrEntry* entry) const;
};

// One reference to a registration: ref->lkey, ref->rkey, ref->mr. Its destructor releases the reference. It must not
// outlive the cache.
using MrRef = std::unique_ptr<const MrEntry, MrReleaser>;

// Owned by a Device. Any thread may call it.
class MrCache {
 public:
  // `relaxed_ordering`: use IBV_ACCESS_RELAXED_ORDERING (needs verbs.reg_mr_iova2). `device` is for log lines.
  // `reg_data_direct` may be nullptr if no request is for Data Direct.
  MrCache(const Verbs& verbs, ibv_pd* pd, const char* device, bool relaxed_ordering,
          Mlx5RegDmabufMr reg_data_direct = nullptr);
  ~MrCache();
  MrCache(const MrCache&) = delete;
  MrCache& operator=(const MrCache&) = delete;

  // A reference to a registration of whole pages that covers [address, address + bytes): an existing one of the same
  // type, ordering and path, or a new one. A dma-buf is not compared: NCCL exports a new descriptor for each
  // registration of the same memory, and memory that is registered keeps its addresses. So an existing registration is
  // used only while somebody has a reference to its whole range: otherwise the application may have freed a part of the
  // memory, and other memory can have the addresses, which the registration does not reach. Overlapping ranges are not
  // merged. For zero bytes it returns the keys of a page of the cache, because a peer must not access any byte of the
  // caller's memory. No lock is held while the driver registers. A failure is logged with its cause and the next step.
  Result<MrRef> acquire(const MrRequest& request) VERBATIM_EXCLUDES(mutex_);

  // Releases `ref`. If it was the last reference, the result is that of ibv_dereg_mr.
  Status release(MrRef ref) VERBATIM_EXCLUDES(mutex_);

  // Any registration that covers [address, address + bytes), for log lines.
  std::optional<MrRegion> find(std::uintptr_t address, std::size_t bytes) const VERBATIM_EXCLUDES(mutex_);

  // The number of registrations.
  std::size_t size() const VERBATIM_EXCLUDES(mutex_);

 private:
  // Registrations of equal kind can be used instead of each other where they cover the range.
  struct RegistrationKind {
    MemoryType type;
    MrOrdering ordering;
    bool data_direct;
    auto operator<=>(const RegistrationKind&) const = default;
  };

  struct Slot;

  // Ranges can overlap, so find_cover searches from the last range that starts at or before the address, towards lower
  // addresses. `max_bytes`, the size of the largest range, limits this search.
  struct Ranges {
    std::multimap<std::uintptr_t, std::unique_ptr<Slot>> by_start;
    std::size_t max_bytes = 0;
  };

  struct Slot : MrEntry {
    std::size_t bytes = 0;
    std::size_t references = 0;
    std::size_t whole_references = 0;  // those to the whole range
    std::map<RegistrationKind, Ranges>::iterator ranges;
    std::multimap<std::uintptr_t, std::unique_ptr<Slot>>::iterator position;
  };

  friend struct MrReleaser;

  MrRef find_cover(const RegistrationKind& key, std::uintptr_t start, std::size_t bytes) VERBATIM_REQUIRES(mutex_);
  Result<UniqueMr> register_range(const MrRequest& request, std::uintptr_t start, std::size_t bytes,
                                  std::uint64_t dmabuf_offset) const;
  Status drop(const MrEntry* entry, bool has_whole_range) VERBATIM_EXCLUDES(mutex_);
  std::string describe_some() const VERBATIM_EXCLUDES(mutex_);

  const Verbs& verbs_;
  ibv_pd* const pd_;
  const char* const device_;
  const bool relaxed_ordering_;
  const Mlx5RegDmabufMr reg_data_direct_;
  const std::size_t page_bytes_;
  const std::unique_ptr<std::byte, void (*)(void*)> zero_byte_page_;  // registered for requests of zero bytes
  mutable Mutex mutex_;
  std::map<RegistrationKind, Ranges> ranges_ VERBATIM_GUARDED_BY(mutex_);
  std::size_t size_ VERBATIM_GUARDED_BY(mutex_) = 0;
};

}  // namespace verbatim
