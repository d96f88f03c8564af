// Where the system forbids processes to write to each other's memory, a thread of the target does it: the sender leaves
// the bytes in the target's segment, or fetches them there. The thread takes no lock, so whoever waits for it under one
// is served. Started when the first peer asks.
#pragma once

#include "softverbs/host/process_view.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

class Process;

// The target's side: starts the thread if a peer has asked for it and it does not run.
void start_copier_if_wanted(Process& process);
// Returns when no copy is under way that was asked for before: a sender that died leaves its own behind, with no lock
// held that would tell of it.
void await_copies(Process& process);

// The sender's side. False: not yet; ask again soon.
bool is_copier_ready(const ProcessView& target);
enum class CopyDirection : std::uint32_t { kToTarget, kFromTarget };
CopyResult copy_through_segment(const ProcessView& target, Incarnation me, CopyDirection direction, Spans& local,
                                Spans& remote);

}  // namespace verbatim::softverbs
