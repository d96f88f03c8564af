#include "softverbs/faults/fault_states.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "softverbs/faults/faults.h"
#include "softverbs/host/device_attributes.h"

namespace verbatim::softverbs {
namespace {

bool covers(std::uint32_t chosen, std::uint32_t device) {
  return chosen == kAnyDevice || chosen == device;
}

bool is_between_processes(const FaultClause& clause) {
  return clause.pids[0] != 0;
}

// Applies in both directions.
bool separates(const FaultClause& clause, std::uint32_t one, std::uint32_t other) {
  return (covers(clause.device, one) && covers(clause.peer_device, other)) ||
         (covers(clause.device, other) && covers(clause.peer_device, one));
}

bool separates_processes(const FaultClause& clause, std::uint32_t one, std::uint32_t other) {
  return (clause.pids[0] == one && clause.pids[1] == other) || (clause.pids[0] == other && clause.pids[1] == one);
}

std::uint64_t later(std::uint64_t now, std::uint64_t by) {
  return by > kWithoutEnd - now ? kWithoutEnd : now + by;
}

// The first empty entry of an address from `begin` on; behind the last entry of the table comes the first one.
std::optional<std::uint32_t> find_empty_gid(const SharedPort& port, std::uint32_t begin) {
  constexpr std::uint32_t kEntries = kGidTableLength - kFirstAddressGid;
  for (std::uint32_t distance = 0; distance < kEntries; ++distance) {
    const std::uint32_t index = kFirstAddressGid + (begin - kFirstAddressGid + distance) % kEntries;
    if (port.gids()[index].valid == 0) return index;
  }
  return std::nullopt;
}

// With renumbered GIDs: from a link that is up again to the addresses of its interface.
constexpr std::uint64_t kAddressDelayNs = 200 * kNanosecondsPerMillisecond;

}  // namespace

bool is_port_open(const Segment& owner, std::uint32_t device, std::uint32_t from) {
  const SharedPort& port = owner.ports[device];
  return owner.frozen.load(std::memory_order_acquire) == 0 && port.link_down.load(std::memory_order_acquire) == 0 &&
         port.fatal.load(std::memory_order_acquire) == 0 &&
         (port.unreachable.load(std::memory_order_acquire) >> from & 1) == 0;
}

bool FaultStates::is_frozen() const {
  return segment_.frozen.load(std::memory_order_acquire) != 0;
}

bool FaultStates::is_unreachable(std::uint32_t device, pid_t peer_pid, std::uint32_t peer_device) {
  if (!is_port_open(segment_, device, peer_device)) return true;
  const auto me = static_cast<std::uint32_t>(segment_.pid);
  const auto other = static_cast<std::uint32_t>(peer_pid);
  MutexLock lock(mutex_);
  return std::any_of(partitions_.begin(), partitions_.end(), [&](const FaultClause& clause) {
    return is_between_processes(clause) && separates_processes(clause, me, other) &&
           separates(clause, device, peer_device);
  });
}

FaultStates::Actions::node_type FaultStates::planned(const FaultClause& clause) {
  Actions one;
  return one.extract(one.emplace(0, Action{clause, false}));
}

void FaultStates::add(const FaultClause& clause) {
  if (clause.at_ns == 0) {
    perform(planned(clause));
  } else {
    plan(later(monotonic_ns(), clause.at_ns), planned(clause));
  }
}

void FaultStates::begin_at_once(const FaultClause& clause) {
  if (clause.kind == FaultKind::kDeviceFatal) {  // fails other QPs, and the caller must not wait for their locks
    plan(monotonic_ns(), planned(clause));
  } else {
    perform(planned(clause));
  }
}

void FaultStates::plan(std::uint64_t due_ns, Actions::node_type action) {
  std::uint64_t first = 0;
  action.key() = due_ns;
  {
    MutexLock lock(mutex_);
    actions_.insert(std::move(action));
    first = actions_.begin()->first;
    active_.store(true, std::memory_order_release);
  }
  faults_.update_active();
  engine_.set_alarm(first);
}

void FaultStates::serve() {
  for (;;) {
    Actions::node_type action;
    {
      MutexLock lock(mutex_);
      if (actions_.empty() || actions_.begin()->first > monotonic_ns()) {
        engine_.set_alarm(actions_.empty() ? kWithoutEnd : actions_.begin()->first);
        return;
      }
      action = actions_.extract(actions_.begin());
    }
    perform(std::move(action));
  }
}

void FaultStates::perform(Actions::node_type performed) {
  Action& action = performed.mapped();
  const FaultClause& clause = action.clause;
  {
    MutexLock lock(mutex_);
    switch (clause.kind) {
      case FaultKind::kLinkDown:
        set_link(clause.device, !action.ends);
        break;
      case FaultKind::kLinkUp:
        set_link(clause.device, false);
        break;
      case FaultKind::kUnreachable:
        if (action.ends) {
          remove_partitions(clause);
        } else {
          partitions_.push_back(clause);
        }
        break;
      case FaultKind::kReachable:
        remove_partitions(clause);
        break;
      case FaultKind::kFreeze:
        segment_.frozen.store(action.ends ? 0 : 1, std::memory_order_release);
        break;
      case FaultKind::kThaw:
        segment_.frozen.store(0, std::memory_order_release);
        break;
      case FaultKind::kGid:
        set_gid(clause);
        break;
      case FaultKind::kGidsReturn:
        return_addresses(monotonic_ns(), true);
        break;
      default:
        break;
    }
    update_ports();
  }
  if (clause.kind == FaultKind::kDeviceFatal) {
    for (std::uint32_t device = 0; device < devices_; ++device) {
      if (covers(clause.device, device)) fail_device(device);
    }
  }
  const bool is_link_up = clause.kind == FaultKind::kLinkUp || (clause.kind == FaultKind::kLinkDown && action.ends);
  if (is_link_up && renumbers_gids_) {
    action = {};
    action.clause.kind = FaultKind::kGidsReturn;
    plan(later(monotonic_ns(), kAddressDelayNs), std::move(performed));
  } else if (!action.ends && clause.for_ns != kWithoutEnd) {
    action.ends = true;
    plan(later(monotonic_ns(), clause.for_ns), std::move(performed));
  } else {
    faults_.update_active();
  }
}

void FaultStates::clear() {
  {
    MutexLock lock(mutex_);
    actions_.clear();
    partitions_.clear();
    segment_.frozen.store(0, std::memory_order_release);
    set_link(kAnyDevice, false);
    return_addresses(kWithoutEnd, false);
    update_ports();
  }
  engine_.set_alarm(kWithoutEnd);
  faults_.update_active();
}

void FaultStates::set_link(std::uint32_t chosen, bool down) {
  for (std::uint32_t device = 0; device < devices_; ++device) {
    SharedPort& port = segment_.ports[device];
    if (!covers(chosen, device) || (port.link_down.exchange(down ? 1 : 0) != 0) == down) continue;
    update_ports();  // before the event: a program that receives it may query the port
    engine_.raise_device_event(device, down ? IBV_EVENT_PORT_ERR : IBV_EVENT_PORT_ACTIVE);
    if (!renumbers_gids_) continue;
    absent_[device].due_ns = down ? kWithoutEnd : later(monotonic_ns(), kAddressDelayNs);
    if (down) remove_addresses(device);
  }
}

void FaultStates::set_gid(const FaultClause& clause) {
  if (clause.gid_index >= kGidTableLength) return;
  for (std::uint32_t device = 0; device < devices_; ++device) {
    if (!covers(clause.device, device)) continue;
    const SharedGid changed = clause.gid_valid ? SharedGid{clause.gid, clause.gid_type, 1} : SharedGid{};
    change_gid(segment_.ports[device], clause.gid_index, changed);
    engine_.raise_device_event(device, IBV_EVENT_GID_CHANGE);
  }
}

void FaultStates::remove_addresses(std::uint32_t device) {
  SharedPort& port = segment_.ports[device];
  for (std::uint32_t index = kFirstAddressGid; index < kGidTableLength; ++index) {
    const SharedGid gid = port.gids()[index];
    if (gid.valid == 0) continue;
    absent_[device].gids.push_back({index, gid});
    change_gid(port, index, {});
    engine_.raise_device_event(device, IBV_EVENT_GID_CHANGE);
  }
}

// Those that are due, to entries behind those that they had, as in Linux while QPs still use the old entries, or to the
// same ones. What finds no empty entry remains absent until the next link that returns.
void FaultStates::return_addresses(std::uint64_t now, bool to_other_entries) {
  for (std::uint32_t device = 0; device < devices_; ++device) {
    AbsentGids& absent = absent_[device];
    if (absent.gids.empty() || absent.due_ns > now) continue;
    const std::uint32_t behind = absent.gids.back().index + 1;
    std::erase_if(absent.gids, [&](const AbsentGid& returning) {
      SharedPort& port = segment_.ports[device];
      const std::optional<std::uint32_t> index = find_empty_gid(port, to_other_entries ? behind : returning.index);
      if (!index) return false;
      change_gid(port, *index, returning.gid);
      engine_.raise_device_event(device, IBV_EVENT_GID_CHANGE);
      return true;
    });
  }
}

// Removes the partitions that the clause names, all of them when it names none.
void FaultStates::remove_partitions(const FaultClause& clause) {
  const bool all = clause.device == kAnyDevice && clause.peer_device == kAnyDevice && !is_between_processes(clause);
  std::erase_if(partitions_, [&](const FaultClause& partition) {
    return all || (partition.device == clause.device && partition.peer_device == clause.peer_device &&
                   partition.pids == clause.pids);
  });
}

void FaultStates::update_ports() {
  bool impaired = segment_.frozen.load(std::memory_order_relaxed) != 0;
  for (std::uint32_t device = 0; device < kMaxDevices; ++device) {
    SharedPort& port = segment_.ports[device];
    std::uint32_t unreachable = 0;
    for (const FaultClause& partition : partitions_) {
      if (is_between_processes(partition)) continue;
      for (std::uint32_t other = 0; other < kMaxDevices; ++other) {
        if (separates(partition, device, other)) unreachable |= 1U << other;
      }
    }
    port.unreachable.store(unreachable, std::memory_order_release);
    impaired = impaired || unreachable != 0 || port.link_down.load(std::memory_order_relaxed) != 0 ||
               port.fatal.load(std::memory_order_relaxed) != 0;
  }
  segment_.impaired.store(impaired ? 1 : 0, std::memory_order_release);
  active_.store(impaired || !partitions_.empty() || !actions_.empty(), std::memory_order_release);
}

// The event is raised first. Then the QPs move to the error state and are flushed.
void FaultStates::fail_device(std::uint32_t device) {
  {
    MutexLock lock(mutex_);
    if (segment_.ports[device].fatal.exchange(1) != 0) return;
    update_ports();
    engine_.raise_device_event(device, IBV_EVENT_DEVICE_FATAL);
  }
  engine_.fail_qps(device);
}

}  // namespace verbatim::softverbs
