// One complete lifetime of the plugin's RMA table in one process: it is loaded, two ranks, which are threads, make a
// communicator, register memory and put, signal and get in every way, and everything is closed, finalized and unloaded.
// A rank closes after its first error. Once both listen, the ranks must fail both or succeed both.
#pragma once

#include "lifetime.h"

namespace fault {

LifetimeResult run_rma_lifetime(int version, const Hooks& hooks = {});

}  // namespace fault
