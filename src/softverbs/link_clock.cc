#include "softverbs/link_clock.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace verbatim::softverbs {
namespace {

constexpr timespec kPatience{0, 20'000'000};

}  // namespace

PortNumber next_port(const SharedClock& clock) {
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

void ring(SharedClock& clock, PortNumber port) {
  if (port.slot == kNoIndex || clock.held != 0) return;
  clock.bells[port.slot].fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &clock.bells[port.slot], FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void bury_ports(SharedClock& clock, const HostRegistry& registry) {
  if (clock.turn_owner != 0 && !registry.is_alive(clock.turn_owner)) clock.turn_owner = 0;
  for (std::uint32_t slot = 0; slot < clock.slots_end; ++slot) {
    for (LinkPort& port : clock.ports[slot]) {
      if (port.backlog != 0 && !registry.is_alive(slot, port.owner)) port.backlog = 0;
    }
  }
  if (clock.turn_owner == 0) ring(clock, next_port(clock));
}

bool await_bell(std::atomic<std::uint32_t>& bell, std::uint32_t seen) {
  ::syscall(SYS_futex, &bell, FUTEX_WAIT, seen, &kPatience, nullptr, 0);
  return bell.load(std::memory_order_seq_cst) != seen;
}

void hold_clock(HostRegistry& registry) {
  SharedClock& clock = registry.clock();
  for (bool is_quiet = false; !is_quiet; ::sched_yield()) {  // a turn that was begun is over soon
    SharedLockGuard lock(clock.lock, registry.me());
    clock.held = 1;
    bury_ports(clock, registry);
    is_quiet = clock.turn_owner == 0;
  }
}

// Everybody begins at the same time and at the front: nothing of what happened before shows in what follows.
void release_clock(HostRegistry& registry) {
  SharedClock& clock = registry.clock();
  SharedLockGuard lock(clock.lock, registry.me());
  for (std::uint32_t slot = 0; slot < clock.slots_end; ++slot) {
    for (const LinkPort& port : clock.ports[slot]) {
      clock.now_ps = std::max({clock.now_ps, port.free_ps, port.taken_in_ps});
    }
  }
  for (std::uint32_t slot = 0; slot < clock.slots_end; ++slot) {
    for (LinkPort& port : clock.ports[slot]) port.free_ps = port.taken_in_ps = clock.now_ps;
  }
  clock.rounds.fetch_add(1, std::memory_order_relaxed);
  clock.held = 0;
  ring(clock, next_port(clock));
}

}  // namespace verbatim::softverbs
