#include "softverbs/host/arena.h"

#include <fcntl.h>

#include <cerrno>
#include <iterator>

namespace verbatim::softverbs {

Result<std::uint64_t> Arena::allocate(std::size_t bytes) {
  const std::size_t wanted = round_up(bytes == 0 ? 1 : bytes, kPageBytes);
  MutexLock lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [offset, available] = *range;
    if (available < wanted) continue;
    if (Status backed = back_with_memory(fd_, offset, wanted); !backed) return backed.error();
    free_.erase(range);
    if (available > wanted) free_.emplace(offset + wanted, available - wanted);
    return offset;
  }
  return system_error("arena", ENOMEM);
}

void Arena::release(std::uint64_t offset, std::size_t bytes) {
  const std::size_t given = round_up(bytes == 0 ? 1 : bytes, kPageBytes);
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(given));
  MutexLock lock(mutex_);
  insert(offset, given);
}

void Arena::insert(std::uint64_t offset, std::size_t bytes) {
  auto place = free_.emplace(offset, bytes).first;
  const auto next = std::next(place);
  if (next != free_.end() && place->first + place->second == next->first) {
    place->second += next->second;
    free_.erase(next);
  }
  if (place == free_.begin()) return;
  const auto previous = std::prev(place);
  if (previous->first + previous->second != place->first) return;
  previous->second += place->second;
  free_.erase(place);
}

}  // namespace verbatim::softverbs
