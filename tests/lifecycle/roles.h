// What this program does as the other process of a test. Each answers the exit status.
#pragma once

#include <cstddef>
#include <memory>

#include "netapi/plugin.h"

namespace conformance {

// "exit-busy" leaves comms and registrations open, requests outstanding and a thread polling them; "exit-idle" has
// closed what it had, only finalize is missing. What the verbs library is asked from exit on goes to standard output.
int leave_busy(std::unique_ptr<netapi::Plugin> plugin, void* context);
int leave_idle(std::unique_ptr<netapi::Plugin> plugin, void* context);

}  // namespace conformance
