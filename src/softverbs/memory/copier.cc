#include "softverbs/memory/copier.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

#include "base/clock.h"
#include "base/log.h"
#include "softverbs/host/device_thread.h"
#include "softverbs/host/doorbell.h"

namespace verbatim::softverbs {
namespace {

constexpr std::size_t kBufferBytes = 128 << 10;  // for each slot
constexpr std::uint64_t kCopyTimeoutNs = kNanosecondsPerSecond / 2;
constexpr timespec kLivenessInterval{0, 1'000'000};
constexpr unsigned kYields = 50;

template <typename Word>
void wake(std::atomic<Word>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

template <typename Word>
void sleep_while(std::atomic<Word>& word, Word value, const timespec* timeout) {
  static_assert(sizeof word == sizeof(std::uint32_t));
  ::syscall(SYS_futex, &word, FUTEX_WAIT, static_cast<std::uint32_t>(value), timeout, nullptr, 0);
}

// Copies between the slot's buffer and the program's memory.
bool execute(const CopySlot& slot, int segment_fd, std::uint64_t buffer) {
  iovec items[kMaxSge];
  for (std::uint32_t i = 0; i < slot.count; ++i) {
    items[i] = {reinterpret_cast<void*>(slot.spans[i].address), slot.spans[i].bytes};
  }
  const CopyDirection direction = slot.is_from_target != 0 ? CopyDirection::kFromTarget : CopyDirection::kToTarget;
  return copy_own_memory(segment_fd, buffer, direction, items, slot.count, slot.bytes);
}

struct CopierThread {
  SharedCopier* shared;
  int segment_fd;
};

void* run_copier(void* argument) {
  const CopierThread thread = *static_cast<CopierThread*>(argument);
  SharedCopier& shared = *thread.shared;
  for (;;) {
    const std::uint32_t wake_count = shared.wake_counter.load(std::memory_order_seq_cst);
    for (std::uint32_t i = 0; i < kCopySlots; ++i) {
      CopySlot& slot = shared.slots[i];
      CopyState full = CopyState::kFull;
      if (!slot.state.compare_exchange_strong(full, CopyState::kBusy)) continue;
      slot.failed = execute(slot, thread.segment_fd, shared.buffers + i * kBufferBytes) ? 0 : 1;
      slot.state.store(CopyState::kDone, std::memory_order_release);
      wake(slot.state);
    }
    sleep_while(shared.wake_counter, wake_count, nullptr);
  }
  return nullptr;
}

// Moves spans of at most a buffer's size in total from the front of the list to the slot.
std::size_t fill_slot(Spans& spans, std::size_t& first, CopySlot& slot) {
  std::size_t bytes = 0;
  slot.count = 0;
  while (first < spans.count() && bytes < kBufferBytes) {
    iovec& span = spans.items()[first];
    const std::size_t piece = std::min(span.iov_len, kBufferBytes - bytes);
    slot.spans[slot.count++] = {reinterpret_cast<std::uintptr_t>(span.iov_base), piece};
    span.iov_base = static_cast<std::byte*>(span.iov_base) + piece;
    span.iov_len -= piece;
    bytes += piece;
    if (span.iov_len == 0) ++first;
  }
  return bytes;
}

// Copies between the sender's own spans, from the front of the list, and a buffer.
void move_local(Spans& spans, std::size_t& first, std::byte* buffer, std::size_t bytes, CopyDirection direction) {
  while (bytes > 0) {
    iovec& span = spans.items()[first];
    const std::size_t piece = std::min(span.iov_len, bytes);
    auto* const local = static_cast<std::byte*>(span.iov_base);
    direction == CopyDirection::kToTarget ? copy_in_order(buffer, local, piece) : copy_in_order(local, buffer, piece);
    span.iov_base = local + piece;
    span.iov_len -= piece;
    buffer += piece;
    bytes -= piece;
    if (span.iov_len == 0) ++first;
  }
}

// False: the target did not copy in time, or is dead, and will not use the buffer any more.
bool await_copy(const ProcessView& target, CopySlot& slot) {
  const std::uint64_t end = monotonic_ns() + kCopyTimeoutNs;
  for (unsigned spin = 0;; ++spin) {
    const CopyState state = slot.state.load(std::memory_order_acquire);
    if (state == CopyState::kDone) return true;
    if (spin < kYields) {
      sched_yield();
      continue;
    }
    sleep_while(slot.state, state, &kLivenessInterval);
    if (!is_alive(target.incarnation())) return false;
    CopyState full = CopyState::kFull;
    if (monotonic_ns() > end && slot.state.compare_exchange_strong(full, CopyState::kFree)) return false;
  }
}

CopySlot& lock_slot(SharedCopier& shared, Incarnation me, std::uint32_t& index)
    VERBATIM_THREAD_ANNOTATION(no_thread_safety_analysis) {
  for (index = 0; index < kCopySlots; ++index) {
    if (shared.slots[index].lock.try_lock(me)) return shared.slots[index];
  }
  index = 0;
  shared.slots[0].lock.lock(me);
  return shared.slots[0];
}

}  // namespace

// The C library's functions would let ThreadSanitizer see a device's accesses, which are not the program's.
bool copy_own_memory(int segment_fd, std::uint64_t offset, CopyDirection direction, const iovec* items,
                     std::size_t count, std::size_t bytes) {
  const long call = direction == CopyDirection::kToTarget ? SYS_preadv : SYS_pwritev;
  return ::syscall(call, segment_fd, items, count, offset, 0L) == static_cast<long>(bytes);
}

void start_copier_if_wanted(Segment& segment, Arena& arena, int segment_fd) {
  SharedCopier& shared = segment.copier;
  if (shared.wanted.load(std::memory_order_acquire) == 0 || shared.ready.load(std::memory_order_relaxed) != 0) return;
  static Mutex mutex;
  MutexLock lock(mutex);
  if (shared.ready.load(std::memory_order_relaxed) != 0) return;
  Result<std::uint64_t> buffers = arena.allocate(kCopySlots * kBufferBytes);
  if (!buffers) return;
  shared.buffers = *buffers;
  static CopierThread thread;  // of a process there is only one
  thread = {&shared, segment_fd};
  if (start_thread("softverbs-copy", run_copier, &thread) != 0) {
    arena.release(shared.buffers);
    return;
  }
  shared.ready.store(1, std::memory_order_release);
}

void await_copies(Segment& segment) {
  SharedCopier& shared = segment.copier;
  if (shared.ready.load(std::memory_order_acquire) == 0) return;
  for (CopySlot& slot : shared.slots) {
    for (;;) {
      const CopyState state = slot.state.load(std::memory_order_seq_cst);
      if (state != CopyState::kFull && state != CopyState::kBusy) break;
      shared.wake_counter.fetch_add(1, std::memory_order_seq_cst);  // the sender may have died before it did so
      wake(shared.wake_counter);
      sleep_while(slot.state, state, &kLivenessInterval);
    }
  }
}

bool is_copier_ready(const ProcessView& target) {
  Segment& segment = target.segment();
  if (segment.copier.ready.load(std::memory_order_acquire) != 0) return true;
  segment.copier.wanted.store(1, std::memory_order_release);
  request_service(segment);
  return false;
}

CopyResult copy_through_segment(const ProcessView& target, Incarnation me, CopyDirection direction, Spans& local,
                                Spans& remote) VERBATIM_THREAD_ANNOTATION(no_thread_safety_analysis) {
  SharedCopier& shared = target.segment().copier;
  std::size_t first_local = 0;
  std::size_t first_remote = 0;
  std::uint32_t index = 0;
  CopySlot& slot = lock_slot(shared, me, index);
  // A sender that died may have left a copy in this slot. Cancel it, or wait until it is done.
  CopyState left = CopyState::kFull;
  slot.state.compare_exchange_strong(left, CopyState::kFree);
  CopyResult result =
      slot.state.load() == CopyState::kBusy && !await_copy(target, slot) ? CopyResult::kProcessDead : CopyResult::kDone;
  auto* const buffer = at_offset<std::byte>(target.segment(), shared.buffers + index * kBufferBytes);
  for (std::size_t left_bytes = local.total(); result == CopyResult::kDone && left_bytes > 0;) {
    slot.bytes = fill_slot(remote, first_remote, slot);
    left_bytes -= slot.bytes;
    slot.is_from_target = direction == CopyDirection::kFromTarget ? 1 : 0;
    if (direction == CopyDirection::kToTarget) move_local(local, first_local, buffer, slot.bytes, direction);
    slot.state.store(CopyState::kFull, std::memory_order_seq_cst);
    shared.wake_counter.fetch_add(1, std::memory_order_seq_cst);
    wake(shared.wake_counter);
    if (!await_copy(target, slot)) {
      result = CopyResult::kProcessDead;
    } else if (slot.failed != 0) {
      result = CopyResult::kFault;
    } else if (direction == CopyDirection::kFromTarget) {
      move_local(local, first_local, buffer, slot.bytes, direction);
    }
  }
  slot.lock.unlock(me);
  return result;
}

}  // namespace verbatim::softverbs
