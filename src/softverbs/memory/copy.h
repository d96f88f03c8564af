// Copies bytes between this process and another with one copy and without the help of the other process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "softverbs/host/process_view.h"
#include "softverbs/memory/spans.h"

#if defined(__SANITIZE_THREAD__)
#define VERBATIM_UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define VERBATIM_UNDER_TSAN 1
#endif
#endif

namespace verbatim::softverbs {

// Copies within this process. Small messages are copied in ascending order: programs poll for the last word of a
// message, and hardware writes in this order.
void copy_in_order(std::byte* to, const std::byte* from, std::size_t bytes);

// A program that polls memory sees a message only behind all that was written before: data, then its flag, its arrival
// word or the words before the last one. On x86-64 this only keeps the compiler from reordering; arm64 executes a
// barrier.
inline void order_behind_earlier_writes() {
  std::atomic_thread_fence(std::memory_order_release);
}

// copy_in_order with a fast path for one word, behind all earlier writes.
inline void copy_word(std::byte* to, const std::byte* from, std::size_t bytes) {
  order_behind_earlier_writes();
#if !defined(VERBATIM_UNDER_TSAN)
  if (bytes == sizeof(std::uint64_t)) {
    std::memcpy(to, from, sizeof(std::uint64_t));
    return;
  }
#endif
  copy_in_order(to, from, bytes);
}

enum class CopyDirection : std::uint32_t { kToTarget, kFromTarget };

enum class CopyResult {
  kDone,
  kProcessDead,
  kForbidden,    // the system does not allow access to the process's memory
  kFault,        // registered memory is no longer mapped
  kSourceFault,  // the same of the memory of this process that is read; only write_late() distinguishes it
};

// Both spans must hold the same number of bytes. The calls modify both.
CopyResult copy_to(const ProcessView& target, Spans& local, Spans& remote);
CopyResult copy_from(const ProcessView& target, Spans& local, Spans& remote);

}  // namespace verbatim::softverbs
