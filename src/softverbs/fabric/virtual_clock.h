// The clock that all ports of the host share: who sends next, and what the control program does with it.
#pragma once

#include <cstdint>

#include "softverbs/host/host_registry.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

struct PortNumber {
  std::uint32_t slot;
  std::uint32_t device;
};

// All of these with clock.lock held.

// The port that is free first of those with something to send, the lower number of two; slot kNoIndex: there is none.
PortNumber next_port(const VirtualClock& clock);
void wake_port(VirtualClock& clock, PortNumber port);
// Takes the turn and the backlog of processes that are gone from them.
void reap_dead_ports(VirtualClock& clock, const HostRegistry& registry);

// Without it. False: not rung for some time.
bool wait_for_wake(std::atomic<std::uint32_t>& wake_counter, std::uint32_t seen);

// For the control program. Both return when it is so.
void hold_clock(HostRegistry& registry);
void release_clock(HostRegistry& registry);

}  // namespace verbatim::softverbs
