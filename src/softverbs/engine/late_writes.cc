#include "softverbs/engine/late_writes.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <iterator>
#include <memory>

#include "base/clock.h"
#include "softverbs/engine/attempt.h"
#include "softverbs/engine/process.h"
#include "softverbs/gpu/gpu.h"
#include "softverbs/gpu/gpu_address.h"
#include "softverbs/host/device_thread.h"
#include "softverbs/host/with_memory.h"
#include "softverbs/memory/copier.h"

namespace verbatim::softverbs {
namespace {

static_assert(kStepBytes <= kLateBytes, "an empty queue has room for a step");

constexpr std::uint64_t kAll = ~std::uint64_t{0};
// When the thread tries again what could not be copied yet.
constexpr std::uint64_t kShowAgainNs = kNanosecondsPerMillisecond;
// How long a peer waits for the thread. The owner may be stopped.
constexpr std::uint64_t kAnswerTimeoutNs = kNanosecondsPerSecond / 2;
constexpr timespec kAnswerInterval{0, 1'000'000};

void wake_waiters(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// `bytes` lie in the segment of this process.
CopyResult write_own_memory(Process& process, const std::byte* bytes, const LateWrite& write) {
  const iovec memory{reinterpret_cast<void*>(write.address), write.bytes};
  const auto offset = static_cast<std::uint64_t>(bytes - reinterpret_cast<const std::byte*>(&process.segment()));
  const bool is_copied =
      copy_own_memory(process.segment_fd(), offset, CopyDirection::kToTarget, &memory, 1, write.bytes);
  return is_copied ? CopyResult::kDone : CopyResult::kFault;
}

CopyResult write_out(const ProcessView& target, const std::byte* bytes, const LateWrite& write) {
  if (target.is_own() && !is_gpu_address(write.address)) return write_own_memory(*Process::joined(), bytes, write);
  Spans held;
  held.add(reinterpret_cast<std::uintptr_t>(bytes), write.bytes);
  Spans memory;
  memory.add(write.address, write.bytes);
  return copy_to(target, held, memory);
}

// Makes visible what is due at that time. What cannot be written any more is dropped: the device has acknowledged it,
// so no request can report it. Every state between two instructions is valid: a process may die here. Then at most one
// write is made twice. The caller holds the queue's lock.
CopyResult show(const ProcessView& target, LateQueue& queue, std::uint64_t due_ns) {
  for (; queue.first < queue.count && queue.writes[queue.first].due_ns <= due_ns; ++queue.first) {
    const LateWrite& write = queue.writes[queue.first];
    const CopyResult result = write_out(target, queue.bytes + write.offset, write);
    if (result == CopyResult::kProcessDead || result == CopyResult::kForbidden) return result;
  }
  return CopyResult::kDone;
}

// Asks the owner's thread. Else a thread of the owner that copies for peers might write older bytes behind newer ones,
// for a peer that has died or does not wait any more.
CopyResult have_owner_show(const ProcessView& target, Incarnation me, LateQueue& queue) {
  {
    SharedLockGuard lock(queue.lock, me);
    if (queue.first >= queue.count) return CopyResult::kDone;
  }
  const std::uint32_t asked = queue.asked.fetch_add(1, std::memory_order_seq_cst) + 1;
  target.segment().late_asked.fetch_add(1, std::memory_order_seq_cst);
  wake_waiters(target.segment().late_asked);
  for (const std::uint64_t end = monotonic_ns() + kAnswerTimeoutNs;;) {
    const std::uint32_t answered = queue.answered.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(answered - asked) >= 0) return CopyResult::kDone;
    if (monotonic_ns() > end || !is_alive(target.incarnation())) return CopyResult::kProcessDead;
    ::syscall(SYS_futex, &queue.answered, FUTEX_WAIT, answered, &kAnswerInterval, nullptr, 0);
  }
}

// Reads all of `from`, memory of this process that the program may have given back.
CopyResult read_source(Spans& from, std::byte* to) {
  CopyResult result = CopyResult::kDone;
  Spans buffer;
  buffer.add(reinterpret_cast<std::uintptr_t>(to), from.total());
  for_each_pair(buffer, from, [&](std::byte* to_bytes, const std::byte* from_bytes, std::size_t bytes) {
    if (result != CopyResult::kDone) return;
    Spans source;
    source.add(reinterpret_cast<std::uintptr_t>(from_bytes), bytes);
    Spans part;
    part.add(reinterpret_cast<std::uintptr_t>(to_bytes), bytes);
    if (source.has_gpu_memory()) {
      result = copy_to(Process::joined()->view(), source, part);
      if (result == CopyResult::kFault) result = CopyResult::kSourceFault;
      return;
    }
    const long moved = ::syscall(SYS_process_vm_readv, ::getpid(), part.items(), 1UL, source.items(), 1UL, 0UL);
    if (moved == static_cast<long>(bytes)) return;
    if (moved >= 0 || errno == EFAULT) {
      result = CopyResult::kSourceFault;
    } else {
      copy_in_order(to_bytes, from_bytes, bytes);  // the system forbids the call
    }
  });
  return result;
}

// False: the queue has no room. The caller holds its lock.
bool hold_back(LateQueue& queue, std::uint64_t address, const std::byte* from, std::uint32_t bytes) {
  if (queue.first >= queue.count) {
    queue.count = 0;
    order_behind_earlier_writes();
    queue.first = 0;
  }
  std::uint32_t offset = 0;
  if (queue.count != 0) {
    const LateWrite& last = queue.writes[queue.count - 1];
    offset = last.offset + last.bytes;
  }
  if (queue.count == kLateWrites || bytes > kLateBytes - offset) return false;
  std::memcpy(queue.bytes + offset, from, bytes);
  queue.writes[queue.count] = {address, monotonic_ns() + queue.delay_ns, bytes, offset};
  order_behind_earlier_writes();
  ++queue.count;
  return true;
}

// Makes visible what is due, and what peers ask for. Returns when to do so again: a write that begins meanwhile is not
// due earlier, so its sender need not wake this thread.
std::uint64_t show_due(Process& process) {
  std::uint64_t next_ns = kAll;
  for (std::uint32_t device = 0; device < process.settings().devices; ++device) {
    for (const MemoryPath path : kMemoryPaths) {
      LateQueue* const queue = late_queue(process.segment(), device, path);
      if (queue == nullptr) continue;
      const std::uint32_t asked = queue->asked.load(std::memory_order_seq_cst);
      const bool is_asked = asked != queue->answered.load(std::memory_order_relaxed);
      const std::uint64_t now = monotonic_ns();
      SharedLockGuard lock(queue->lock, process.me());
      const bool is_shown = show(process.view(), *queue, is_asked ? kAll : now) == CopyResult::kDone;
      next_ns = std::min(next_ns, now + (is_shown ? queue->delay_ns : kShowAgainNs));
      if (!is_shown) continue;
      if (queue->first < queue->count) next_ns = std::min(next_ns, queue->writes[queue->first].due_ns);
      if (!is_asked) continue;
      queue->answered.store(asked, std::memory_order_release);
      wake_waiters(queue->answered);
    }
  }
  return next_ns;
}

void* show_late_writes_in_time(void* argument) {
  CurrentGpu::keep_in_this_thread();
  Process& process = *static_cast<Process*>(argument);
  std::atomic<std::uint32_t>& asked = process.segment().late_asked;
  for (;;) {
    const std::uint32_t before = asked.load(std::memory_order_seq_cst);
    if (!process.engine().enter()) return nullptr;  // the process ends, and its memory with it
    const std::uint64_t next_ns = show_due(process);
    process.engine().leave();
    const std::uint64_t now = monotonic_ns();
    const std::uint64_t wait_ns = next_ns > now ? next_ns - now : 0;
    const timespec timeout{static_cast<time_t>(wait_ns / kNanosecondsPerSecond),
                           static_cast<long>(wait_ns % kNanosecondsPerSecond)};
    ::syscall(SYS_futex, &asked, FUTEX_WAIT, before, &timeout, nullptr, 0);
  }
}

}  // namespace

Status prepare_late_writes(Process& process) {
  const Settings& settings = process.settings();
  const std::uint32_t delays_ms[] = {settings.late_host_ms, settings.late_gpu_ms,
                                     settings.data_direct.empty() ? 0 : settings.late_gpu_ms};  // by MemoryPath
  Segment& segment = process.segment();
  for (std::uint32_t device = 0; device < settings.devices; ++device) {
    for (std::size_t path = 0; path < std::size(delays_ms); ++path) {
      if (delays_ms[path] == 0) continue;
      const Result<std::uint64_t> offset = process.arena().allocate(sizeof(LateQueue));
      if (!offset) return offset.error();
      at_offset<LateQueue>(segment, *offset)->delay_ns = delays_ms[path] * kNanosecondsPerMillisecond;
      segment.ports[device].late_queues[path] = *offset;
      segment.has_late_writes = 1;
    }
  }
  return {};
}

Status start_late_writes(Process& process) {
  if (process.segment().has_late_writes == 0) return {};
  const int error = start_thread("softverbs-late", show_late_writes_in_time, &process);
  if (error == 0) return {};
  return system_error("pthread_create", error);
}

CopyResult write_late(const ProcessView& target, Incarnation me, std::uint32_t device, Spans& from, Spans& to) {
  // Before any queue is locked: that may take long.
  std::unique_ptr<std::byte[]> bytes;
  if (!with_memory([&] { bytes = std::make_unique_for_overwrite<std::byte[]>(from.total()); }))
    return CopyResult::kProcessDead;
  CopyResult result = read_source(from, bytes.get());
  Spans source;
  source.add(reinterpret_cast<std::uintptr_t>(bytes.get()), from.total());
  for_each_pair(to, source, [&](std::byte* to_bytes, const std::byte* from_bytes, std::size_t count) {
    if (result != CopyResult::kDone) return;
    const auto address = reinterpret_cast<std::uintptr_t>(to_bytes);
    const MemoryPath path = path_to(address);
    if (LateQueue* const queue = late_queue(target.segment(), device, path); queue != nullptr) {
      if (path == MemoryPath::kHost && target.known_copy_path() == ProcessView::CopyPath::kNone) {
        result = CopyResult::kForbidden;
        return;
      }
      for (bool is_held = false; !is_held && result == CopyResult::kDone;) {
        {
          SharedLockGuard lock(queue->lock, me);
          is_held = hold_back(*queue, address, from_bytes, static_cast<std::uint32_t>(count));
        }
        if (!is_held) result = show_late_writes(target, me, device, path);
      }
      return;
    }
    Spans part;
    part.add(reinterpret_cast<std::uintptr_t>(from_bytes), count);
    Spans destination;
    destination.add(address, count);
    destination.set_gpu_memory(to.gpu_memory());
    result = copy_to(target, part, destination);
  });
  return result;
}

CopyResult show_late_writes(const ProcessView& target, Incarnation me, std::uint32_t device, MemoryPath path) {
  LateQueue* const queue = late_queue(target.segment(), device, path);
  if (queue == nullptr) return CopyResult::kDone;
  const bool is_reachable = path == MemoryPath::kHost && target.known_copy_path() == ProcessView::CopyPath::kDirect;
  if (!target.is_own() && !is_reachable) return have_owner_show(target, me, *queue);
  SharedLockGuard lock(queue->lock, me);
  return show(target, *queue, kAll);
}

}  // namespace verbatim::softverbs
