#include "softverbs/engine/events.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/log.h"
#include "base/unique_fd.h"
#include "softverbs/engine/process.h"
#include "softverbs/host/device_attributes.h"

namespace verbatim::softverbs {
namespace {

template <std::size_t kWords>
void ask_owner(Segment& segment, std::atomic<std::uint32_t>& events, std::atomic<std::uint64_t> (&bitmap)[kWords],
               std::size_t index) {
  events.fetch_add(1, std::memory_order_relaxed);
  bitmap[index / 64].fetch_or(std::uint64_t{1} << (index % 64), std::memory_order_release);
  segment.has_unwritten_events.store(1, std::memory_order_seq_cst);
  request_service(segment);
}

template <std::size_t kWords, typename Serve>
void serve(std::atomic<std::uint64_t> (&bitmap)[kWords], Serve serve_index) {
  for (std::uint32_t word = 0; word < kWords; ++word) {
    if (bitmap[word].load(std::memory_order_relaxed) == 0) continue;
    std::uint64_t bits = bitmap[word].exchange(0, std::memory_order_acq_rel);
    for (; bits != 0; bits &= bits - 1) serve_index(word * 64 + static_cast<std::uint32_t>(__builtin_ctzll(bits)));
  }
}

// Writes one byte into a pipe whose write end is descriptor `fd` of that process.
bool write_event_byte(const ProcessView& process, int fd) {
  if (fd < 0) return false;
  const char byte = 0;
  if (process.is_own()) {
    // A write to a full pipe fails, but the pipe is readable then.
    static_cast<void>(!::write(fd, &byte, 1));
    return true;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", process.pid(), fd);
  // Opened for reading too: if the owner closes its end meanwhile, the write raises no SIGPIPE.
  const UniqueFd pipe(::open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!pipe) {
    static std::atomic<bool> is_reported{false};
    if (errno != ENOENT && !is_reported.exchange(true)) {
      VERBATIM_WARN(
          "process %d cannot be notified of an event, it may not wake up: %s. Next: check the permissions of "
          "/proc/%d/fd",
          process.pid(), std::strerror(errno), process.pid());
    }
    return false;
  }
  struct stat info {};
  if (::fstat(pipe.get(), &info) != 0 || !S_ISFIFO(info.st_mode)) return false;
  static_cast<void>(!::write(pipe.get(), &byte, 1));
  return true;
}

void append(const ProcessView& process, SharedContext& queue, const AsyncEntry& event) VERBATIM_REQUIRES(queue.lock) {
  if (queue.tail - queue.head == kAsyncQueueLength) return;
  queue.entries[queue.tail % kAsyncQueueLength] = event;
  ++queue.tail;
  Segment& segment = process.segment();
  if (process.shares_pid_namespace()) {
    write_event_byte(process, queue.pipe_fd);
  } else {
    ask_owner(segment, queue.unwritten_events, segment.unwritten_contexts,
              static_cast<std::size_t>(&queue - segment.contexts));
  }
}

}  // namespace

bool wake_channel(const ProcessView& process, SharedCq& cq) {
  if (process.shares_pid_namespace()) return write_event_byte(process, cq.channel_fd);
  Segment& segment = process.segment();
  ask_owner(segment, cq.unwritten_events, segment.unwritten_cqs, static_cast<std::size_t>(&cq - segment.cqs));
  return true;
}

void write_events_of_peers(Process& process) {
  Segment& segment = process.segment();
  if (segment.has_unwritten_events.load(std::memory_order_relaxed) == 0) return;
  segment.has_unwritten_events.exchange(0, std::memory_order_seq_cst);  // acquire: the bitmaps are read behind it
  // The locks exclude that the descriptor is closed meanwhile and belongs to another file.
  serve(segment.unwritten_cqs, [&](std::uint32_t index) {
    SharedCq& cq = segment.cqs[index];
    SharedLockGuard lock(cq.lock, process.me());
    if (cq.alive.load(std::memory_order_relaxed) == 0) return;
    for (std::uint32_t left = cq.unwritten_events.exchange(0); left != 0; --left) {
      write_event_byte(process.view(), cq.channel_fd);
    }
  });
  serve(segment.unwritten_contexts, [&](std::uint32_t index) {
    SharedContext& queue = segment.contexts[index];
    SharedLockGuard lock(queue.lock, process.me());
    for (std::uint32_t left = queue.unwritten_events.exchange(0); left != 0; --left) {
      write_event_byte(process.view(), queue.pipe_fd);  // -1 when the context is closed
    }
  });
}

void raise_event(const ProcessView& process, Incarnation me, std::uint32_t context, const AsyncEntry& event) {
  SharedContext& queue = process.segment().contexts[context];
  SharedLockGuard lock(queue.lock, me);
  append(process, queue, event);
}

void raise_device_event(Process& process, std::uint32_t device, ibv_event_type type) {
  for (std::uint32_t index = 0; index < process.context_table().high_water(); ++index) {
    SharedContext& queue = process.segment().contexts[index];
    SharedLockGuard lock(queue.lock, process.me());
    if (queue.is_open == 0 || queue.device != device) continue;
    append(process.view(), queue, {static_cast<std::uint32_t>(type), EventTarget::kPort, kPortNumber, 0});
  }
}

void request_service(const ProcessView& process, std::uint32_t qp_index) {
  Segment& segment = process.segment();
  segment.failed_qps[qp_index / 64].fetch_or(std::uint64_t{1} << (qp_index % 64), std::memory_order_release);
  request_service(segment);
}

}  // namespace verbatim::softverbs
