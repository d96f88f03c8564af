// Memory regions: registration by the owner, and the checks that every access of a work request passes, in the
// owner's table of any process.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "base/result.h"
#include "softverbs/copy.h"
#include "softverbs/objects.h"

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

// The address in the owning process of [address, address + length) of a region; 0 when key, domain, access or bounds
// do not allow it. Valid until the caller lets go of the lock under which it asked.
std::uint64_t translate(const Segment& owner, const Region& region, std::uint64_t address, std::uint64_t length);

}  // namespace verbatim::softverbs
