// The virtual clock that all ports of the host share: selection of the next sender, and hold and release.
#pragma once

#include <cstdint>

#include "softverbs/host/host_registry.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

struct PortNumber {
  std::uint32_t slot;
  std::uint32_t device;
};

// The caller of these three holds clock.lock.

// The port with pending requests that is free first; of two, the lower slot, then the lower device. Slot kNoIndex:
// none.
PortNumber next_port(const VirtualClock& clock);
void wake_port(VirtualClock& clock, PortNumber port);
// Removes the grant and the backlog of dead processes.
void reap_dead_ports(VirtualClock& clock, const HostRegistry& registry);

// The caller does not hold clock.lock. False: no wake-up before the timeout.
bool wait_for_wake(std::atomic<std::uint32_t>& wake_counter, std::uint32_t seen);

// For the control program. hold_clock returns when no port sends any more.
void hold_clock(HostRegistry& registry);
void release_clock(HostRegistry& registry);

}  // namespace verbatim::softverbs
