// Allocates rings behind the tables of this process's segment: whole, zeroed pages. Only allocated ranges have memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/shm_file.h"

namespace verbatim::softverbs {

// Thread-safe. Offsets are from the start of the segment.
class Arena {
 public:
  explicit Arena(const UniqueFd& fd) : fd_(fd) {
    MutexLock lock(mutex_);
    free_.emplace(kArenaOffset, kArenaBytes);
  }

  Result<std::uint64_t> allocate(std::size_t bytes);
  void release(std::uint64_t offset, std::size_t bytes);

 private:
  void insert(std::uint64_t offset, std::size_t bytes) VERBATIM_REQUIRES(mutex_);

  const UniqueFd& fd_;
  Mutex mutex_;
  std::map<std::uint64_t, std::size_t> free_ VERBATIM_GUARDED_BY(mutex_);  // offset to size; adjacent ranges are merged
};

}  // namespace verbatim::softverbs
