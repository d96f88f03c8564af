#include "softverbs/memory/copy.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "softverbs/memory/copier.h"
#include "softverbs/memory/gpu_copies.h"

namespace verbatim::softverbs {
namespace {

// Programs poll for the last word of a small message, and hardware writes a message in ascending order. memcpy may not.
constexpr std::size_t kOrderedBytes = 256;

}  // namespace

#if defined(VERBATIM_UNDER_TSAN)
// ThreadSanitizer must not see a device's accesses, which are not the program's. It would see those of memcpy.
__attribute__((no_sanitize("thread"))) void copy_in_order(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes; ++done) {
    *static_cast<volatile std::byte*>(to + done) = *static_cast<const volatile std::byte*>(from + done);
  }
}
#else
void copy_in_order(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > kOrderedBytes) {
    std::memmove(to, from, bytes);
    return;
  }
  std::size_t done = 0;
  for (; done + sizeof(std::uint64_t) <= bytes; done += sizeof(std::uint64_t)) {
    std::uint64_t word;
    std::memcpy(&word, from + done, sizeof word);
    std::memcpy(to + done, &word, sizeof word);
    order_behind_earlier_writes();
  }
  for (; done < bytes; ++done) to[done] = from[done];
}
#endif

namespace {

void advance(iovec*& items, std::size_t& count, std::size_t bytes) {
  while (bytes > 0 && bytes >= items->iov_len) {
    bytes -= items->iov_len;
    ++items;
    --count;
  }
  if (bytes == 0) return;
  items->iov_base = static_cast<std::byte*>(items->iov_base) + bytes;
  items->iov_len -= bytes;
}

CopyResult failure(const ProcessView& target) {
  switch (errno) {
    case ESRCH:
      target.mark_dead();  // known sooner than by its record lock
      return CopyResult::kProcessDead;
    case EPERM:
    case ENOSYS:
      return CopyResult::kForbidden;
    default:
      return CopyResult::kFault;
  }
}

// The system's copies need not be in ascending order where stores can pass stores, so the last word of a small message
// has a call of its own there.
#if defined(__x86_64__)
constexpr std::size_t kLastBytes = 0;
#else
constexpr std::size_t kLastBytes = sizeof(std::uint64_t);
#endif

// The bytes at the end of what is left to copy that this call must not copy.
std::size_t kept_for_last_call(CopyDirection direction, std::size_t left, const iovec& last) {
  const bool is_polled = direction == CopyDirection::kToTarget && left > kLastBytes && left <= kOrderedBytes;
  return is_polled && last.iov_len > kLastBytes ? kLastBytes : 0;
}

using VmCall = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

CopyResult copy_across_processes(VmCall call, const ProcessView& target, CopyDirection direction, Spans& local,
                                 Spans& remote) {
  if (target.known_copy_path() == ProcessView::CopyPath::kThroughSegment) {
    return copy_through_segment(target, target.registry().me(), direction, local, remote);
  }
  if (target.known_copy_path() == ProcessView::CopyPath::kNone) return CopyResult::kForbidden;
  iovec* local_items = local.items();
  iovec* remote_items = remote.items();
  std::size_t local_count = local.count();
  std::size_t remote_count = remote.count();
  std::size_t left = local.total();
  while (left > 0) {
    iovec& last = local_items[local_count - 1];
    const std::size_t kept = kept_for_last_call(direction, left, last);
    last.iov_len -= kept;
    const ssize_t moved = call(target.pid(), local_items, local_count, remote_items, remote_count, 0);
    last.iov_len += kept;
    order_behind_earlier_writes();
    if (moved < 0) return failure(target);
    if (moved == 0) return CopyResult::kFault;
    const std::size_t bytes = static_cast<std::size_t>(moved);
    left -= bytes;
    advance(local_items, local_count, bytes);
    advance(remote_items, remote_count, bytes);
  }
  return CopyResult::kDone;
}

}  // namespace

CopyResult copy_to(const ProcessView& target, Spans& local, Spans& remote) {
  order_behind_earlier_writes();
  if (local.has_gpu_memory() || remote.has_gpu_memory()) {
    return copy_gpu_memory(target, CopyDirection::kToTarget, local, remote);
  }
  if (!target.is_own())
    return copy_across_processes(::process_vm_writev, target, CopyDirection::kToTarget, local, remote);
  for_each_pair(remote, local, copy_in_order);
  return CopyResult::kDone;
}

CopyResult copy_from(const ProcessView& target, Spans& local, Spans& remote) {
  if (local.has_gpu_memory() || remote.has_gpu_memory()) {
    return copy_gpu_memory(target, CopyDirection::kFromTarget, local, remote);
  }
  if (!target.is_own())
    return copy_across_processes(::process_vm_readv, target, CopyDirection::kFromTarget, local, remote);
  for_each_pair(local, remote, copy_in_order);
  return CopyResult::kDone;
}

}  // namespace verbatim::softverbs
