#include "net/monitor/rma_sets.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"

namespace verbatim {

void RmaSets::add(MonitoredRmaSet& set) {
  const MutexLock lock(mutex_);
  sets_.push_back({++made_, &set});
  handler_.call_at(0);
}

void RmaSets::remove(MonitoredRmaSet& set, bool remembers) noexcept {
  const MutexLock lock(mutex_);
  const auto found = std::find_if(sets_.begin(), sets_.end(), [&](const Entry& entry) { return entry.set == &set; });
  if (found == sets_.end()) return;
  try {
    if (remembers) removed_.push_back(set.stats(found->number, monotonic_ns()));
  } catch (...) {
    VERBATIM_WARN("no memory to remember what the RMA contexts have carried (VERBATIM_STATS)");
  }
  sets_.erase(found);
}

std::uint64_t RmaSets::check() noexcept {
  const MutexLock lock(mutex_);
  const std::uint64_t now = monotonic_ns();
  bool outstanding = false;
  for (const Entry& entry : sets_) outstanding = entry.set->check_stalls(settings_, now) || outstanding;
  // At multiples of the period, as the other connections: one wake-up serves both.
  const std::uint64_t period = outstanding ? settings_.busy_period_ns() : settings_.idle_period_ns();
  return sets_.empty() ? kNever : (now / period + 1) * period;
}

void RmaSets::device_event(const Device& device, const ibv_async_event& event) noexcept {
  const MutexLock lock(mutex_);
  for (const Entry& entry : sets_) entry.set->device_event(device, event);
}

std::string RmaSets::state_json(std::uint64_t now) const {
  std::vector<std::string> all;
  const MutexLock lock(mutex_);
  for (const Entry& entry : sets_) all.push_back("\n" + entry.set->stats(entry.number, now).json);
  return json_list(all);
}

std::vector<RmaStats> RmaSets::take_removed() {
  const MutexLock lock(mutex_);
  return std::exchange(removed_, {});
}

}  // namespace verbatim
