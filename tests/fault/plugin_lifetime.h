// One whole life of the plugin in one process: loaded, initialised, two ends connected, every kind of traffic between
// them, closed, finalized, unloaded. Whatever answers with an error on the way, the rest is what NCCL would still do:
// close what there is.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fault {

struct LifetimeResult {
  std::string failed;                 // the first call that answered with an error, and with which; empty: none
  std::vector<std::string> warnings;  // that the plugin has logged
  std::string state;                  // what VERBATIM_STATE_SOCKET gave, where that is set
  std::string violation;              // a promise that was not kept: a hang, wrong bytes; empty: none
};

struct Hooks {
  std::function<void()> loaded;    // the plugin is there, nothing of it has been called
  std::function<void()> unloaded;  // it is gone
};

LifetimeResult run_lifetime(int version, const Hooks& hooks = {});

}  // namespace fault
