#include "softverbs/host/arena.h"

#include <fcntl.h>

#include <cerrno>
#include <iterator>
#include <utility>

#include "softverbs/host/with_memory.h"

namespace verbatim::softverbs {

Result<std::uint64_t> Arena::allocate(std::size_t bytes) {
  const std::size_t rounded = round_up(bytes == 0 ? 1 : bytes, kPageBytes);
  Ranges one;
  if (!with_memory([&] { one.emplace(0, rounded); })) return system_error("arena", ENOMEM);
  MutexLock lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [offset, available] = *range;
    if (available < rounded) continue;
    if (Status backed = back_with_memory(fd_, offset, rounded); !backed) return backed.error();
    Ranges::node_type used = one.extract(one.begin());
    used.key() = offset;
    used_.insert(std::move(used));
    Ranges::node_type rest = free_.extract(range);
    if (available == rounded) return offset;
    rest.key() = offset + rounded;
    rest.mapped() = available - rounded;
    free_.insert(std::move(rest));
    return offset;
  }
  return system_error("arena", ENOMEM);
}

void Arena::release(std::uint64_t offset) {
  Ranges::node_type used;
  {
    MutexLock lock(mutex_);
    used = used_.extract(offset);
  }
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(used.mapped()));
  MutexLock lock(mutex_);
  auto range = free_.insert(std::move(used)).position;
  const auto next = std::next(range);
  if (next != free_.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return;
  const auto previous = std::prev(range);
  if (previous->first + previous->second != range->first) return;
  previous->second += range->second;
  free_.erase(range);
}

}  // namespace verbatim::softverbs
