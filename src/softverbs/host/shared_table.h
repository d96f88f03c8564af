// Allocates the indices of one table in this process's segment, and backs the entries with memory at their first use.
// A released index goes to the end of a queue, so that a stale reference finds an empty entry for some time.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>

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

  // ENOMEM: `limit` entries are in use.
  Result<std::uint32_t> allocate(std::uint32_t limit) {
    MutexLock lock(mutex_);
    if (used_ >= limit || used_ >= capacity_) return system_error("table", ENOMEM);
    std::uint32_t index = next_;
    if (released_.size() > kReuseDelayEntries || next_ == capacity_) {
      index = released_.front();
      released_.pop_front();
    } else {
      if (Status backed = ensure_backing(index); !backed) return backed.error();
      ++next_;
      counters_.table_end.store(next_, std::memory_order_release);
    }
    ++used_;
    counters_.count_created();
    return index;
  }

  void release(std::uint32_t index) {
    MutexLock lock(mutex_);
    released_.push_back(index);
    --used_;
    counters_.count_destroyed();
  }

  // No index at or above the result was ever allocated.
  std::uint32_t high_water() {
    MutexLock lock(mutex_);
    return next_;
  }

 private:
  static constexpr std::size_t kReuseDelayEntries = 64;

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
  std::uint32_t used_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::size_t backed_end_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::deque<std::uint32_t> released_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim::softverbs
