// The end of the plugin: the library is unloaded, or the process exits.
#pragma once

#include <atomic>

#include "net/context/context.h"

namespace verbatim::abi {

// The context of the process, for table versions up to v10; nullptr before init. They have no finalize: it is closed
// when the library is unloaded.
extern std::atomic<Context*> g_process_context;

// Called by each init. Without this call, contexts would also be closed when the process exits, and in forked children.
void register_exit_handler();

}  // namespace verbatim::abi
