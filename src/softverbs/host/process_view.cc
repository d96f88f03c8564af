#include "softverbs/host/process_view.h"

#include <sys/uio.h>

#include <cerrno>

#include "base/clock.h"
#include "base/log.h"

namespace verbatim::softverbs {

bool ProcessView::is_alive(std::uint64_t now_ns) const {
  if (dead_.load(std::memory_order_relaxed) || segment().closed.load(std::memory_order_acquire) != 0) return false;
  if (now_ns - checked_ns_.load(std::memory_order_relaxed) < kNanosecondsPerMillisecond) return true;
  if (!registry_.is_alive(slot_, incarnation())) {
    mark_dead();
    return false;
  }
  checked_ns_.store(now_ns, std::memory_order_relaxed);
  return true;
}

ProcessView::CopyPath ProcessView::copy_path(const Settings& settings) {
  CopyPath known = known_copy_path();
  if (known != CopyPath::kUnknown) return known;
  std::uint64_t word = 0;
  const iovec local{&word, sizeof word};
  const iovec remote{reinterpret_cast<void*>(segment().probe_address), sizeof word};
  const bool is_foreign = !shares_pid_namespace();
  const bool is_forbidden =
      settings.forbid_cross_memory || is_foreign ||
      (::process_vm_readv(pid_, &local, 1, &remote, 1, 0) < 0 && (errno == EPERM || errno == ENOSYS));
  known = CopyPath::kDirect;
  if (is_forbidden)
    known = settings.threaded && segment().is_threaded != 0 ? CopyPath::kThroughSegment : CopyPath::kNone;
  if (is_own()) known = CopyPath::kDirect;
  copy_path_.store(known, std::memory_order_relaxed);
  static std::atomic<bool> is_reported{false};
  if (known == CopyPath::kDirect || is_reported.exchange(true)) return known;
  VERBATIM_WARN("%s: %s%s",
                known == CopyPath::kThroughSegment ? "data is copied by a thread of the other process, which is slower"
                                                   : "transfers to other processes fail",
                is_foreign ? "the other process is in another PID namespace, or in an unknown one (no /proc). Next: "
                             "run both in one with /proc (in a container: docker --pid)"
                           : "this system forbids process_vm_writev between processes. Next: allow the ptrace group of "
                             "system calls (in a container: docker --cap-add SYS_PTRACE)",
                known == CopyPath::kThroughSegment ? "" : ", or set SOFTVERBS_ENGINE=thread in all processes");
  return known;
}

}  // namespace verbatim::softverbs
