// The sets of RMA contexts of this process, as far as the monitor needs them: it looks for stalls, and reads what they
// have carried. RMA adds and removes them; net knows no more of RMA.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "net/monitor/rma_stats.h"
#include "net/monitor/stall_detector.h"
#include "runtime/event_loop.h"
#include "verbs/device.h"

namespace verbatim {

// Contexts that were made together. Its functions are called one at a time.
class MonitoredRmaSet {
 public:
  // The monitoring thread reports what has stalled, or lets it fail. Returns whether something is outstanding: the next
  // check is nearer then. It calls no verb.
  virtual bool check_stalls(const StallSettings& settings, std::uint64_t now) noexcept = 0;
  // Of a device: the link of a port is down, or its GID table has changed; others are ignored. Not the monitoring
  // thread.
  virtual void device_event(const Device& device, const ibv_async_event& event) noexcept = 0;
  // `number`: of the set in the process, from 1.
  virtual RmaStats stats(std::uint64_t number, std::uint64_t now) const = 0;

 protected:
  ~MonitoredRmaSet() = default;
};

// Owned by the monitor. Any thread; state_json is the monitoring thread's.
class RmaSets {
 public:
  RmaSets(EventLoop& loop, const StallSettings& settings)
      : settings_(settings), handler_(loop, nullptr, [this] { return check(); }) {}

  // `set` must outlive the call of remove.
  void add(MonitoredRmaSet& set) VERBATIM_EXCLUDES(mutex_);
  // After it no function of the set is called. `remembers`: what it has carried is for the file of statistics.
  void remove(MonitoredRmaSet& set, bool remembers) noexcept VERBATIM_EXCLUDES(mutex_);

  void device_event(const Device& device, const ibv_async_event& event) noexcept VERBATIM_EXCLUDES(mutex_);
  // The list of the sets, as JSON.
  std::string state_json(std::uint64_t now) const VERBATIM_EXCLUDES(mutex_);
  // What the sets that were removed have carried; they are forgotten.
  std::vector<RmaStats> take_removed() VERBATIM_EXCLUDES(mutex_);

 private:
  struct Entry {
    std::uint64_t number = 0;
    MonitoredRmaSet* set = nullptr;
  };

  // Looks for stalls. Returns when it is to be called again.
  std::uint64_t check() noexcept VERBATIM_EXCLUDES(mutex_);

  const StallSettings settings_;
  mutable Mutex mutex_;
  std::list<Entry> sets_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<RmaStats> removed_ VERBATIM_GUARDED_BY(mutex_);
  std::uint64_t made_ VERBATIM_GUARDED_BY(mutex_) = 0;
  EventHandler handler_;
};

}  // namespace verbatim
