// One complete lifetime of the plugin in one process: it is loaded and initialised, two comms are connected, they
// exchange every kind of message, and everything is closed, finalized and unloaded.
#pragma once

#include "lifetime.h"

namespace fault {

LifetimeResult run_lifetime(int version, const Hooks& hooks = {});

}  // namespace fault
