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

  // ENOMEM, ENOSPC: there is no memory.
  Result<std::uint64_t> allocate(std::size_t bytes);
  void release(std::uint64_t offset);

 private:
  using Ranges = std::map<std::uint64_t, std::size_t>;  // offset to size

  const UniqueFd& fd_;
  Mutex mutex_;
  Ranges free_ VERBATIM_GUARDED_BY(mutex_);  // adjacent ranges are merged
  Ranges used_ VERBATIM_GUARDED_BY(mutex_);  // their release needs no memory
};

}  // namespace verbatim::softverbs
