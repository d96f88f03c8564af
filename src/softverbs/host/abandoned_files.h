// Files in /dev/shm that killed processes of other namespaces have left. HostRegistry removes those of its own
// namespace.
#pragma once

#include <string>

namespace verbatim::softverbs {

// Removes the registries of this user that no running process uses, and their segments, in all namespaces and PID
// namespaces that share this /dev/shm. Keeps the registry `own`, which may not exist yet, and registries with a held
// clock. Called before this process opens its registry: closing a file releases the record locks of the process on it.
void remove_abandoned_files(const std::string& own);

}  // namespace verbatim::softverbs
