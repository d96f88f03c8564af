// Allocates the indices of one table in this process's segment, and backs the entries with memory at their first use.
// A released index goes to the end of a queue, so that a stale reference finds an empty entry for some time.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/shm_file.h"

namespace verbatim::softverbs {

// Thread-safe. Process owns one for each table.
class SharedTable {
 public:
  SharedTable(const UniqueFd& fd, std::size_t offset, std::size_t entry_bytes, std::uint32_t capacity,
              ObjectCounters& counters)
      : fd_(fd), offset_(offset), entry_bytes_(entry_bytes), capacity_(capacity), counters_(counters) {}

  // ENOMEM: `limit` entries are in use. Throws where memory runs out, and has changed nothing then.
  Result<std::uint32_t> allocate(std::uint32_t limit) {
    MutexLock lock(mutex_);
    const std::uint32_t used = next_ - released_;
    if (used >= limit || used >= capacity_) return system_error("table", ENOMEM);
    std::uint32_t index = next_;
    if (released_ > kReuseDelayEntries || next_ == capacity_) {
      index = first_released_;
      first_released_ = released_behind_[index];
      --released_;
    } else {
      released_behind_.resize(index + std::size_t{1});
      if (Status backed = ensure_backing(index); !backed) return backed.error();
      ++next_;
      counters_.table_end.store(next_, std::memory_order_release);
    }
    counters_.count_created();
    return index;
  }

  // Needs no memory.
  void release(std::uint32_t index) {
    MutexLock lock(mutex_);
    (released_++ == 0 ? first_released_ : released_behind_[last_released_]) = index;
    last_released_ = index;
    counters_.count_destroyed();
  }

  // No index at or above the result was ever allocated.
  std::uint32_t high_water() {
    MutexLock lock(mutex_);
    return next_;
  }

 private:
  static constexpr std::uint32_t kReuseDelayEntries = 64;

  Status ensure_backing(std::uint32_t index) VERBATIM_REQUIRES(mutex_) {
    const std::size_t end = offset_ + (index + 1) * entry_bytes_;
    if (end <= backed_end_) return {};
    const std::size_t begin = (offset_ + index * entry_bytes_) / kPageBytes * kPageBytes;
    const std::size_t new_end = round_up(end, kPageBytes);
    Status backed = back_with_memory(fd_, begin, new_end - begin);
    if (backed) backed_end_ = new_end;
    return backed;
  }

  const UniqueFd& fd_;
  const std::size_t offset_;
  const std::size_t entry_bytes_;
  const std::uint32_t capacity_;
  ObjectCounters& counters_;
  Mutex mutex_;
  std::uint32_t next_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::size_t backed_end_ VERBATIM_GUARDED_BY(mutex_) = 0;
  // The queue of the released indices.
  std::uint32_t released_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::uint32_t first_released_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::uint32_t last_released_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::vector<std::uint32_t> released_behind_ VERBATIM_GUARDED_BY(mutex_);  // by index: the next one in the queue
};

}  // namespace verbatim::softverbs
