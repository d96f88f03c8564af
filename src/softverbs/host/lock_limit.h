// The limit on memory that a process may pin, as the kernel applies it to registrations with a hardware device.
#pragma once

#include <cstdint>

namespace verbatim::softverbs {

// Whether `pinned_bytes`, the pages of all regions of this process, are more than RLIMIT_MEMLOCK allows. The limit does
// not apply to a thread with CAP_IPC_LOCK in the initial user namespace (root). Prints one line the first time.
bool exceeds_lock_limit(std::uint64_t pinned_bytes);

}  // namespace verbatim::softverbs
