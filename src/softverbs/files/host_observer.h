// Reads the state of the ports of a namespace without joining it, for the files in sysfs.
#pragma once

#include <array>

#include "base/unique_fd.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/settings.h"
#include "softverbs/host/shm_file.h"

namespace verbatim::softverbs {

// Not thread-safe. It keeps the registry's file open as long as the file is linked: this process may have joined the
// namespace, and closing the file would release the record lock by which the process is known to be alive.
class HostObserver {
 public:
  explicit HostObserver(const Settings& settings) : settings_(settings) {}

  // Adds what has passed through the ports since the first process of the namespace started.
  void add_traffic(HostTraffic& sum);
  // The port as this process sees it, or, when this process has no device open, as the first process of the namespace
  // does. False, with no change of `port`: no process of the namespace has a device open.
  bool copy_port(std::uint32_t device, SharedPort& port);

 private:
  const Registry* registry();
  // Calls visit(slot, is_own, segment) for each process of the registry, also for those that were killed, until it
  // returns false.
  template <typename Visit>
  void for_each_segment(const Registry& registry, Visit visit);

  const Settings settings_;
  std::string name_;
  UniqueFd fd_;
  Mapping mapping_;
};

}  // namespace verbatim::softverbs
