#include "softverbs/host/arena.h"

#include <fcntl.h>

#include <cerrno>
#include <iterator>

namespace verbatim::softverbs {

Result<std::uint64_t> Arena::allocate(std::size_t bytes) {
  const std::size_t rounded = round_up(bytes == 0 ? 1 : bytes, kPageBytes);
  MutexLock lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [offset, available] = *range;
    if (available < rounded) continue;
    if (Status backed = back_with_memory(fd_, offset, rounded); !backed) return backed.error();
    free_.erase(range);
    if (available > rounded) free_.emplace(offset + rounded, available - rounded);
    return offset;
  }
  return system_error("arena", ENOMEM);
}

void Arena::release(std::uint64_t offset, std::size_t bytes) {
  const std::size_t rounded = round_up(bytes == 0 ? 1 : bytes, kPageBytes);
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(rounded));
  MutexLock lock(mutex_);
  insert(offset, rounded);
}

void Arena::insert(std::uint64_t offset, std::size_t bytes) {
  auto range = free_.emplace(offset, bytes).first;
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
