// One complete lifetime of the plugin in one process: it is loaded and initialised, two comms are connected, they
// exchange every kind of message, and everything is closed, finalized and unloaded. After an error the comms that exist
// are closed, as NCCL does.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fault {

struct LifetimeResult {
  std::string failed;                 // the first call that returned an error, and the error; empty: none
  std::vector<std::string> warnings;  // warnings that the plugin logged
  std::string state;                  // text read from VERBATIM_STATE_SOCKET, when it is set
  std::string violation;              // a broken guarantee: a hang or wrong bytes; empty: none
};

struct Hooks {
  std::function<void()> loaded;    // called after the plugin was loaded, before any call into it
  std::function<void()> unloaded;  // called after the plugin was unloaded
};

LifetimeResult run_lifetime(int version, const Hooks& hooks = {});

}  // namespace fault
