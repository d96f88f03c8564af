#include "softverbs/host/lock_limit.h"

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <fstream>

#include "base/log.h"

namespace verbatim::softverbs {
namespace {

// The kernel checks the capability against the initial user namespace, so root of another one is not exempt.
bool is_in_initial_user_namespace() {
  std::uint32_t first = 1;
  std::uint32_t outside = 1;
  std::uint32_t count = 0;
  std::ifstream("/proc/self/uid_map") >> first >> outside >> count;
  return first == 0 && outside == 0 && count == ~0U;
}

bool is_exempt() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3]{};
  if (::syscall(SYS_capget, &header, data) != 0) return false;
  if ((data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK)) == 0) return false;
  static const bool is_initial = is_in_initial_user_namespace();
  return is_initial;
}

}  // namespace

bool exceeds_lock_limit(std::uint64_t pinned_bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  if (pinned_bytes <= limit.rlim_cur || is_exempt()) return false;
  static std::atomic<bool> was_reported{false};
  if (!was_reported.exchange(true)) {
    VERBATIM_WARN(
        "a registration is refused with ENOMEM, as a hardware device would refuse it: the process would have %llu KiB "
        "of registered memory, and its limit is %llu KiB. Next: raise the limit (ulimit -l), or set "
        "SOFTVERBS_LOCK_LIMIT=none",
        static_cast<unsigned long long>(pinned_bytes >> 10), static_cast<unsigned long long>(limit.rlim_cur >> 10));
  }
  return true;
}

}  // namespace verbatim::softverbs
