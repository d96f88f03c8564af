// Faults that last: ports that are down, partitions, a fatal error, a frozen process, a changed GID table. A clause
// says when they begin and end. Programs receive asynchronous events; peers read the state in the segment.
#pragma once

#include <infiniband/verbs.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "softverbs/host/device_attributes.h"
#include "softverbs/host/fault_script.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

class Faults;

// What lasting faults need from the engine. Implemented by Process.
class FaultActions {
 public:
  // FaultStates::serve() is called once at or after that time; UINT64_MAX: never.
  virtual void set_alarm(std::uint64_t due_ns) = 0;
  // Raises an event on every context that has the device open.
  virtual void raise_device_event(std::uint32_t device, ibv_event_type type) = 0;
  // Moves all QPs of the device to the error state.
  virtual void fail_qps(std::uint32_t device) = 0;

 protected:
  ~FaultActions() = default;
};

// Whether port `device` of `owner` accepts packets from a port of device `from`. Needed only while Segment::impaired is
// set.
bool is_port_open(const Segment& owner, std::uint32_t device, std::uint32_t from);

// Owned by Faults. Thread-safe.
class FaultStates {
 public:
  FaultStates(Segment& segment, const Settings& settings, FaultActions& actions, Faults& faults)
      : segment_(segment),
        devices_(settings.devices),
        renumbers_gids_(settings.renumbers_gids && settings.ethernet),
        engine_(actions),
        faults_(faults) {
    for (AbsentGids& absent : absent_) absent.gids.reserve(kGidTableLength);
  }

  // Begins the fault now, or at the clause's time.
  void add(const FaultClause& clause);
  // Begins the fault now, called in the data path. Work that may wait for locks is left to the engine.
  void begin_at_once(const FaultClause& clause);
  // Begins and ends the faults that are due. The engine calls it at its alarm.
  void serve();
  // Ends all faults except a device's fatal error.
  void clear();

  bool is_frozen() const;
  // Whether a fault of this process keeps packets of `device` from reaching that device of that process.
  bool is_unreachable(std::uint32_t device, pid_t peer_pid, std::uint32_t peer_device);
  bool has_active() const { return active_.load(std::memory_order_acquire); }

 private:
  struct Action {
    FaultClause clause;
    bool ends;
  };
  using Actions = std::multimap<std::uint64_t, Action>;  // by time

  // The addresses that the GID table of a port has lost with its link.
  struct AbsentGid {
    std::uint32_t index;  // that it had
    SharedGid gid;
  };
  struct AbsentGids {
    std::vector<AbsentGid> gids;
    std::uint64_t due_ns = kWithoutEnd;  // when they return; kWithoutEnd: the link is down
  };

  static Actions::node_type planned(const FaultClause& clause);
  void plan(std::uint64_t due_ns, Actions::node_type action) VERBATIM_EXCLUDES(mutex_);
  // What follows is planned with the memory of the action: a fault that has begun ends.
  void perform(Actions::node_type performed) VERBATIM_EXCLUDES(mutex_);
  void set_link(std::uint32_t device, bool down) VERBATIM_REQUIRES(mutex_);
  void set_gid(const FaultClause& clause) VERBATIM_REQUIRES(mutex_);
  void remove_addresses(std::uint32_t device) VERBATIM_REQUIRES(mutex_);
  void return_addresses(std::uint64_t now, bool to_other_entries) VERBATIM_REQUIRES(mutex_);
  void remove_partitions(const FaultClause& clause) VERBATIM_REQUIRES(mutex_);
  void update_ports() VERBATIM_REQUIRES(mutex_);
  void fail_device(std::uint32_t device) VERBATIM_EXCLUDES(mutex_);

  Segment& segment_;
  const std::uint32_t devices_;
  const bool renumbers_gids_;
  FaultActions& engine_;
  Faults& faults_;
  mutable Mutex mutex_;
  Actions actions_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<FaultClause> partitions_ VERBATIM_GUARDED_BY(mutex_);
  std::array<AbsentGids, kMaxDevices> absent_ VERBATIM_GUARDED_BY(mutex_);  // by device
  std::atomic<bool> active_{false};
};

}  // namespace verbatim::softverbs
