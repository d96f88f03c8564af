// Copies through the target's segment where the system forbids processes to access each other's memory. The sender
// places the bytes in the segment, or fetches them there; a thread of the target copies between the segment and its
// memory. That thread takes no lock, so a sender may wait for it while holding one. It is started when the first peer
// needs it.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "softverbs/host/arena.h"
#include "softverbs/host/process_view.h"
#include "softverbs/memory/copy.h"

namespace verbatim::softverbs {

// For the target: starts the thread if a peer has asked for it and it does not run yet.
void start_copier_if_wanted(Segment& segment, Arena& arena, int segment_fd);
// For the target: copies between its segment, from `offset` on, and its memory, by file I/O on the segment: for memory
// that is no longer mapped the system call fails, and no SIGSEGV occurs. True: all `bytes` are copied.
bool copy_own_memory(int segment_fd, std::uint64_t offset, CopyDirection direction, const iovec* items,
                     std::size_t count, std::size_t bytes);
// For the target: returns when every copy requested before this call has ended. A sender that died may leave a
// requested copy behind without holding a lock that would show it.
void await_copies(Segment& segment);

// For the sender. False: the thread does not run yet; call again soon.
bool is_copier_ready(const ProcessView& target);
CopyResult copy_through_segment(const ProcessView& target, Incarnation me, CopyDirection direction, Spans& local,
                                Spans& remote);

}  // namespace verbatim::softverbs
