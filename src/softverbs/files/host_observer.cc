#include "softverbs/files/host_observer.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "softverbs/host/host_registry.h"
#include "softverbs/host/traffic.h"

namespace verbatim::softverbs {
namespace {

constexpr int kAttempts = 100;  // a process that was killed while its traffic moved leaves an odd number

}  // namespace

const Registry* HostObserver::registry() {
  struct stat info {};
  if (!fd_ || ::fstat(fd_.get(), &info) != 0 || info.st_nlink == 0) {
    mapping_ = Mapping();
    name_ = registry_name(settings_);
    Result<UniqueFd> fd = open_shm(name_, OpenMode::kExisting);
    if (!fd) return nullptr;
    fd_ = *std::move(fd);
  }
  if (mapping_.as<Registry>() == nullptr) {
    const bool complete = ::fstat(fd_.get(), &info) == 0 && info.st_size >= static_cast<off_t>(sizeof(Registry));
    if (!complete || !is_backed(fd_)) return nullptr;
    Result<Mapping> mapping = map_shm(fd_, sizeof(Registry));
    if (!mapping) return nullptr;
    mapping_ = *std::move(mapping);
  }
  return mapping_.as<Registry>();
}

template <typename Visit>
void HostObserver::for_each_segment(const Registry& registry, Visit visit) {
  for (std::uint32_t slot = 0; slot < kMaxProcesses; ++slot) {
    const ProcessSlot& entry = registry.slots[slot];
    const Incarnation incarnation = entry.incarnation.load(std::memory_order_acquire);
    if (incarnation == 0) continue;
    // When both PID namespaces are unknown, only the lock tells the process from one of another namespace: F_GETLK does
    // not report a lock of this process itself.
    const bool is_own = entry.pid.load(std::memory_order_relaxed) == ::getpid() &&
                        entry.pid_namespace.load(std::memory_order_relaxed) == own_pid_namespace() &&
                        !is_slot_held(fd_.get(), slot);
    const Result<Mapping> mapping = map_segment(segment_name(name_, incarnation));
    if (!mapping || mapping->as<Segment>()->incarnation != incarnation) continue;
    if (!visit(slot, is_own, *mapping->as<Segment>())) return;
  }
}

void HostObserver::add_traffic(HostTraffic& sum) {
  const Registry* const all = registry();
  if (all == nullptr) return;
  for (int attempt = 1;; ++attempt) {
    HostTraffic now{};
    const std::uint32_t departures = all->departures.load(std::memory_order_acquire);
    add_shared(now, all->ended_traffic);
    // Processes that were killed count until the next process moves their traffic.
    for_each_segment(*all, [&](std::uint32_t, bool, const Segment& segment) {
      softverbs::add_traffic(now, segment);
      return true;
    });
    std::atomic_thread_fence(std::memory_order_acquire);
    const bool consistent = departures % 2 == 0 && all->departures.load(std::memory_order_relaxed) == departures;
    if (!consistent && attempt < kAttempts) continue;
    add_shared(sum, now);
    return;
  }
}

bool HostObserver::copy_port(std::uint32_t device, SharedPort& port) {
  const Registry* const all = registry();
  bool found = false;
  if (all == nullptr) return false;
  for_each_segment(*all, [&](std::uint32_t slot, bool is_own, const Segment& segment) {
    if (!is_own && (found || !is_slot_held(fd_.get(), slot))) return true;
    const SharedPort& seen = segment.ports[device];
    if (seen.ethernet == 0 && seen.lid == 0) return true;  // that process has fewer devices
    port.ethernet = seen.ethernet;
    port.lid = seen.lid;
    port.grh_required = seen.grh_required;
    port.link_down.store(seen.link_down.load(std::memory_order_acquire), std::memory_order_relaxed);
    port.gid_changes.store(0, std::memory_order_relaxed);
    std::copy_n(seen.gids(), kGidTableLength, port.gid_tables[0]);
    found = true;
    return !is_own;
  });
  return found;
}

}  // namespace verbatim::softverbs
