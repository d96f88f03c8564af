// What one lifetime of the plugin has shown: it is loaded, does work, and is unloaded. After an error the objects that
// exist are closed, as NCCL does.
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

}  // namespace fault
