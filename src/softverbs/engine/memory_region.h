// Memory regions: registration by the owner, and the checks that every access of a work request passes, in the
// owner's table of any process.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "base/result.h"
#include "softverbs/engine/objects.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

// EINVAL for flags that contradict each other, EFAULT for memory that is not there, ENOMEM at the limit.
Result<Mr*> register_memory(Context& context, ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova,
                            unsigned access);
// The same of `length` bytes from `offset` on of what a descriptor stands for. The device maps them for itself, so that
// they are there in whatever way the program has them. EOPNOTSUPP unless SOFTVERBS_DMABUF=1.
Result<Mr*> register_dmabuf(Context& context, ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                            int fd, unsigned access);
// Returns when no work request of any process touches the region any more.
void deregister_memory(Mr& mr);

enum class KeyKind { kLocal, kRemote };

struct Region {
  KeyKind kind;
  std::uint32_t key;
  std::uint32_t pd;
  std::uint32_t access;  // flags that the region must have
};

constexpr std::uint32_t kKeyVariantBits = 8;  // the rest of a key is the entry's index + 1

// The address in the owning process of [address, address + length) of a region; 0 when key, domain, access or bounds
// do not allow it. Valid until the caller lets go of the lock under which it asked.
inline std::uint64_t translate(const Segment& owner, const Region& region, std::uint64_t address,
                               std::uint64_t length) {
  const std::uint32_t index = (region.key >> kKeyVariantBits) - 1;
  if (index >= kMaxMrs) return 0;
  const SharedMr& mr = owner.mrs[index];
  const std::atomic<std::uint32_t>& key = region.kind == KeyKind::kLocal ? mr.lkey : mr.rkey;
  if (key.load(std::memory_order_seq_cst) != region.key) return 0;
  if (mr.pd != region.pd || (mr.access & region.access) != region.access) return 0;
  const std::uint64_t offset = address - mr.iova;  // beyond any length when it lies before the region
  if (offset > mr.length || length > mr.length - offset) return 0;
  return mr.address + offset;
}

}  // namespace verbatim::softverbs
