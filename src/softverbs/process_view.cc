#include "softverbs/process_view.h"

#include "base/clock.h"

namespace verbatim::softverbs {

bool ProcessView::is_alive(std::uint64_t now_ns) {
  if (gone_.load(std::memory_order_relaxed) || segment().closed.load(std::memory_order_acquire) != 0) return false;
  if (now_ns - checked_ns_.load(std::memory_order_relaxed) < kNanosecondsPerMillisecond) return true;
  if (!registry_.is_alive(slot_, incarnation())) {
    mark_gone();
    return false;
  }
  checked_ns_.store(now_ns, std::memory_order_relaxed);
  return true;
}

}  // namespace verbatim::softverbs
