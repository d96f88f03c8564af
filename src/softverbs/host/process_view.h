// A process as its peers see it: its mapped segment and the way to copy to and from its memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "softverbs/host/host_registry.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/shm_file.h"

namespace verbatim::softverbs {

// Thread-safe. Shared by the routes that lead to the process; the cache in Process holds a weak reference.
class ProcessView : public std::enable_shared_from_this<ProcessView> {
 public:
  ProcessView(Mapping mapping, const HostRegistry& registry, std::uint32_t slot, pid_t pid)
      : mapping_(std::move(mapping)), registry_(registry), slot_(slot), pid_(pid) {}

  Segment& segment() const { return *mapping_.as<Segment>(); }
  Incarnation incarnation() const { return segment().incarnation; }
  pid_t pid() const { return pid_; }
  // False: pid() means nothing here, so this process cannot access its memory and descriptors.
  bool shares_pid_namespace() const { return registry_.shares_pid_namespace(slot_); }
  bool is_own() const { return incarnation() == registry_.me(); }

  // Asks the kernel at most once a millisecond: no pid is reused in less time than that.
  bool is_alive(std::uint64_t now_ns) const;
  // How this process copies to and from the memory of that process; copy_path() finds out at its first call.
  enum class CopyPath : std::uint8_t { kUnknown, kDirect, kThroughSegment, kNone };
  CopyPath copy_path(const Settings& settings);
  const HostRegistry& registry() const { return registry_; }
  CopyPath known_copy_path() const { return copy_path_.load(std::memory_order_relaxed); }

  void mark_dead() const { dead_.store(true, std::memory_order_relaxed); }

 private:
  const Mapping mapping_;
  const HostRegistry& registry_;
  const std::uint32_t slot_;
  const pid_t pid_;
  mutable std::atomic<bool> dead_{false};
  mutable std::atomic<std::uint64_t> checked_ns_{0};
  std::atomic<CopyPath> copy_path_{CopyPath::kUnknown};
};

}  // namespace verbatim::softverbs
