// A simulated run. Its processes are children of this one, so that nothing is left of it.
#pragma once

#include <cstddef>
#include <functional>

#include "simulation/scheduler.h"

namespace simulation {

struct Result {
  bool passed = false;
  Outcome outcome;
};

// `job` runs in each process, on its first thread, and returns whether all was as it must be. The run fails also if a
// thread or a descriptor is left, on a deadlock, on a crash, and when a limit of the plan has passed. Lines on stderr
// say why.
Result run(const Plan& plan, std::size_t processes, const std::function<bool(std::size_t process)>& job);
// Of one process.
Result run(const Plan& plan, const std::function<bool()>& job);

}  // namespace simulation
