// Asynchronous events, and the pipes that wake a sleeping program for events and completions, also from other
// processes.
#pragma once

#include "softverbs/host/doorbell.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

class Process;

// Makes the pipe of the CQ's completion channel readable. False when the pipe is closed or the process cannot be
// reached; the latter is logged once. For a process of another PID namespace its engine does it.
bool wake_channel(const ProcessView& process, SharedCq& cq);

// For the owner: makes the pipes readable for which peers of other PID namespaces have asked.
void write_events_of_peers(Process& process);

// Appends an event to the queue of that process's context. Dropped when the queue is full: its descriptor is readable.
void raise_event(const ProcessView& process, Incarnation me, std::uint32_t context, const AsyncEntry& event);

// Raises an event on every context of this process that has the device open.
void raise_device_event(Process& process, std::uint32_t device, ibv_event_type type);

// Requests service from the owner of a QP that a peer moved to the error state: its engine must flush the send queue.
void request_service(const ProcessView& process, std::uint32_t qp_index);

}  // namespace verbatim::softverbs
