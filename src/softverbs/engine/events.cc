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

namespace {

void append(const ProcessView& process, SharedContext& queue, const AsyncEntry& event) VERBATIM_REQUIRES(queue.lock) {
  if (queue.tail - queue.head == kAsyncQueueLength) return;
  queue.entries[queue.tail % kAsyncQueueLength] = event;
  ++queue.tail;
  write_event_byte(process, queue.pipe_fd);
}

}  // namespace

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
