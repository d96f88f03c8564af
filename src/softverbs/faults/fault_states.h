// Faults that last: ports that are down, partitions, a fatal error, a frozen device, a changed GID table. They begin
// when a clause says so and may end; programs hear of them by asynchronous events, peers see them in the segment.
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

// Whether a port of `owner` takes and answers what another port, of device `from`, sends to it. Asked when
// Segment::impaired says that a port may not.
bool is_port_open(const Segment& owner, std::uint32_t device, std::uint32_t from);

// Thread-safe.
class FaultStates {
 public:
  FaultStates(Process& process, Faults& faults) : process_(process), faults_(faults) {}

  // Begins now, or at its time.
  void take(const FaultClause& clause);
  // The same from within the data path: what cannot be done there is left to the engine.
  void begin_at_once(const FaultClause& clause);
  // Begins and ends what is due; called by the engine at its alarm.
  void serve();
  // Ends everything, except that a device that had a fatal error stays dead.
  void clear();

  bool is_frozen() const;
  // Whether nothing that the QP sends reaches that device of that process.
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
