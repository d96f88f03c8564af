// Faults that last: ports that are down, partitions, a fatal error, a frozen process, a changed GID table. A clause
// says when they begin and end. Programs receive asynchronous events; peers read the state in the segment.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "softverbs/host/fault_script.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

class Faults;
class Process;
class ProcessView;
struct Qp;

// Whether port `device` of `owner` accepts packets from a port of device `from`. Needed only while Segment::impaired is
// set.
bool is_port_open(const Segment& owner, std::uint32_t device, std::uint32_t from);

// Owned by Faults. Thread-safe.
class FaultStates {
 public:
  FaultStates(Process& process, Faults& faults) : process_(process), faults_(faults) {}

  // Begins the fault now, or at the clause's time.
  void add(const FaultClause& clause);
  // Begins the fault now, called in the data path. Work that may wait for locks is left to the engine.
  void begin_at_once(const FaultClause& clause);
  // Begins and ends the faults that are due. The engine calls it at its alarm.
  void serve();
  // Ends all faults except a device's fatal error.
  void clear();

  bool is_frozen() const;
  // Whether a fault of this process keeps the QP's packets from reaching that device of that process.
  bool is_unreachable(const Qp& qp, const ProcessView& peer, std::uint32_t peer_device);
  bool has_active() const { return active_.load(std::memory_order_acquire); }

 private:
  struct Action {
    FaultClause clause;
    bool ends;
  };

  void plan(std::uint64_t due_ns, const Action& action) VERBATIM_EXCLUDES(mutex_);
  void perform(const Action& action) VERBATIM_EXCLUDES(mutex_);
  void set_link(std::uint32_t device, bool down) VERBATIM_REQUIRES(mutex_);
  void set_gid(const FaultClause& clause) VERBATIM_REQUIRES(mutex_);
  void remove_partitions(const FaultClause& clause) VERBATIM_REQUIRES(mutex_);
  void update_ports() VERBATIM_REQUIRES(mutex_);
  void fail_device(std::uint32_t device) VERBATIM_EXCLUDES(mutex_);
  bool applies(const FaultClause& clause, std::uint32_t device) const;

  Process& process_;
  Faults& faults_;
  mutable Mutex mutex_;
  std::multimap<std::uint64_t, Action> actions_ VERBATIM_GUARDED_BY(mutex_);  // by time
  std::vector<FaultClause> partitions_ VERBATIM_GUARDED_BY(mutex_);
  std::atomic<bool> active_{false};
};

}  // namespace verbatim::softverbs
