#include "softverbs/fabric/virtual_clock.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace verbatim::softverbs {
namespace {

constexpr timespec kWakeTimeout{0, 20'000'000};

}  // namespace

PortNumber next_port(const VirtualClock& clock) {
  PortNumber first{kNoIndex, 0};
  std::uint64_t earliest = 0;
  for (std::uint32_t slot = 0; slot < clock.slots_end; ++slot) {
    for (std::uint32_t device = 0; device < kMaxDevices; ++device) {
      const LinkPort& port = clock.ports[slot][device];
      if (port.backlog == 0 || (first.slot != kNoIndex && port.free_ps >= earliest)) continue;
      first = {slot, device};
      earliest = port.free_ps;
    }
  }
  return first;
}

void wake_port(VirtualClock& clock, PortNumber port) {
  if (port.slot == kNoIndex || clock.held != 0) return;
  clock.wake_counters[port.slot].fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &clock.wake_counters[port.slot], FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void reap_dead_ports(VirtualClock& clock, const HostRegistry& registry) {
  if (clock.grant_owner != 0 && !registry.is_alive(clock.grant_owner)) clock.grant_owner = 0;
  for (std::uint32_t slot = 0; slot < clock.slots_end; ++slot) {
    for (LinkPort& port : clock.ports[slot]) {
      if (port.backlog != 0 && !registry.is_alive(slot, port.owner)) port.backlog = 0;
    }
  }
  if (clock.grant_owner == 0) wake_port(clock, next_port(clock));
}

bool wait_for_wake(std::atomic<std::uint32_t>& wake_counter, std::uint32_t seen) {
  ::syscall(SYS_futex, &wake_counter, FUTEX_WAIT, seen, &kWakeTimeout, nullptr, 0);
  return wake_counter.load(std::memory_order_seq_cst) != seen;
}

void hold_clock(HostRegistry& registry) {
  VirtualClock& clock = registry.clock();
  for (bool is_quiet = false; !is_quiet; ::sched_yield()) {  // a grant that is in use ends soon
    SharedLockGuard lock(clock.lock, registry.me());
    clock.held = 1;
    reap_dead_ports(clock, registry);
    is_quiet = clock.grant_owner == 0;
  }
}

// All ports continue at the same virtual time, so that what happened before has no influence on the order.
void release_clock(HostRegistry& registry) {
  VirtualClock& clock = registry.clock();
  SharedLockGuard lock(clock.lock, registry.me());
  for (std::uint32_t slot = 0; slot < clock.slots_end; ++slot) {
    for (const LinkPort& port : clock.ports[slot]) {
      clock.now_ps = std::max({clock.now_ps, port.free_ps, port.received_ps});
    }
  }
  for (std::uint32_t slot = 0; slot < clock.slots_end; ++slot) {
    for (LinkPort& port : clock.ports[slot]) port.free_ps = port.received_ps = clock.now_ps;
  }
  clock.releases.fetch_add(1, std::memory_order_relaxed);
  clock.held = 0;
  wake_port(clock, next_port(clock));
}

}  // namespace verbatim::softverbs
