// Asynchronous events and the pipes that announce events to a sleeping program, also across processes.
#pragma once

#include "softverbs/host/doorbell.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

class Process;

// Writes one byte into a pipe whose write end is descriptor `fd` of that process. False when it cannot be reached,
// which is said once on stderr, or is closed.
bool write_event_byte(const ProcessView& process, int fd);

// Appends an event to the queue of that process's context. A full queue drops it: the descriptor is readable anyway.
void raise_event(const ProcessView& process, Incarnation me, std::uint32_t context, const AsyncEntry& event);

// Tells every context of this process that has the device open.
void raise_device_event(Process& process, std::uint32_t device, ibv_event_type type);

// The QP is in the error state by a peer's doing: its owner's engine must flush what it has posted.
void request_service(const ProcessView& process, std::uint32_t qp_index);

}  // namespace verbatim::softverbs
