// Shared files that killed processes of other namespaces have left. HostRegistry removes those of its own namespace.
#pragma once

#include <string>

namespace verbatim::softverbs {

// Removes the registries of this user that no running process uses, and their segments, in all namespaces and PID
// namespaces that share the directory of the registry `own`. Keeps registries with a held clock and `own`, which may
// not exist yet: opening and closing it would release the record locks that this process holds on it.
void remove_abandoned_files(const std::string& own);

}  // namespace verbatim::softverbs
