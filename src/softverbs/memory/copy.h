// The wire: moves bytes between this process and another, once, without that process's help.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"

#if defined(__SANITIZE_THREAD__)
#define VERBATIM_UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define VERBATIM_UNDER_TSAN 1
#endif
#endif

namespace verbatim::softverbs {

// The places of one step of a message, in order, in one process.
class Spans {
 public:
  void add(std::uint64_t address, std::size_t bytes) {
    if (bytes == 0) return;
    items_[count_++] = {reinterpret_cast<void*>(address), bytes};
    total_ += bytes;
  }
  iovec* items() { return items_.data(); }
  std::size_t count() const { return count_; }
  std::size_t total() const { return total_; }

 private:
  std::array<iovec, kMaxSge> items_;
  std::size_t count_ = 0;
  std::size_t total_ = 0;
};

// Within this process. Small messages in ascending order, as programs poll for the last word of one, and as devices
// place them.
void place(std::byte* to, const std::byte* from, std::size_t bytes);

inline void copy_word(std::byte* to, const std::byte* from, std::size_t bytes) {
#if !defined(VERBATIM_UNDER_TSAN)
  if (bytes == sizeof(std::uint64_t)) {
    std::memcpy(to, from, sizeof(std::uint64_t));
    return;
  }
#endif
  place(to, from, bytes);
}

enum class CopyResult {
  kDone,
  kProcessDead,  // the process has ended
  kForbidden,    // the system does not let us touch its memory
  kFault,        // memory that was registered is no longer mapped
};

// Both spans hold the same number of bytes; they are used up.
CopyResult copy_to(const ProcessView& target, Spans& local, Spans& remote);
CopyResult copy_from(const ProcessView& target, Spans& local, Spans& remote);

}  // namespace verbatim::softverbs
