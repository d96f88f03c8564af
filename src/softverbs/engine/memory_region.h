// Memory regions: their registration, and the checks that every access of a work request must pass. The checks work on
// the table of any process.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "base/result.h"
#include "softverbs/engine/context.h"
#include "softverbs/engine/objects.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

// EINVAL: invalid combination of flags. EOPNOTSUPP: flags for memory windows or on-demand paging. EFAULT: memory that
// is not mapped. ENOMEM: the limit on regions or on pinned memory is reached. GPU memory needs
// SOFTVERBS_GPU_MEMORY=peer-memory or both. EIO: CUDA refuses what copies of it need.
Result<Mr*> register_memory(Context& context, ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova,
                            unsigned access);
// If `iova` is the address of GPU memory, registers `length` bytes there; `fd` must be a valid descriptor, that of
// CUDA's dma-buf. Else, with SOFTVERBS_DMABUF=1, registers `length` bytes from `offset` of any descriptor that mmap
// accepts; the device maps them itself, so the program need not have a mapping. `data_direct`: the device reaches GPU
// memory through its Data Direct interface. EBADF: no such descriptor. EOPNOTSUPP: the program has not loaded CUDA, or
// SOFTVERBS_GPU_MEMORY forbids it, and SOFTVERBS_DMABUF is 0; or `data_direct` and an `iova` within a page. EINVAL:
// `data_direct` without such an interface; anything else.
Result<Mr*> register_dmabuf(Context& context, ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                            int fd, unsigned access, bool data_direct);
// For a forked child: pinned memory is not inherited, so the parent's regions do not count for it.
void forget_regions_of_parent();
// When it returns, no work request of any process accesses the region.
void deregister_memory(Mr& mr);

enum class KeyKind { kLocal, kRemote };

struct Region {
  KeyKind kind;
  std::uint32_t key;
  std::uint32_t pd;
  std::uint32_t access;  // flags that the region must have
};

constexpr std::uint32_t kKeyVariantBits = 8;  // low bits of a key; the other bits are the table index + 1

// Translates [address, address + length) of a region to its address in the owning process. 0 when key, protection
// domain, access flags or bounds do not allow it. Valid while the caller holds the QP lock under which it called.
inline std::uint64_t translate(const Segment& owner, const Region& region, std::uint64_t address,
                               std::uint64_t length) {
  const std::uint32_t index = (region.key >> kKeyVariantBits) - 1;
  if (index >= kMaxMrs) return 0;
  const SharedMr& mr = owner.mrs[index];
  const std::atomic<std::uint32_t>& key = region.kind == KeyKind::kLocal ? mr.lkey : mr.rkey;
  if (key.load(std::memory_order_seq_cst) != region.key) return 0;
  if (mr.pd != region.pd || (mr.access & region.access) != region.access) return 0;
  const std::uint64_t offset = address - mr.iova;  // an address below the region wraps to a large offset
  if (offset > mr.length || length > mr.length - offset) return 0;
  return mr.address + offset;
}

// SharedMr::gpu_memory of a region that translate() has found.
inline std::uint32_t gpu_memory_of(const Segment& owner, std::uint32_t key) {
  return owner.mrs[(key >> kKeyVariantBits) - 1].gpu_memory;
}

}  // namespace verbatim::softverbs
