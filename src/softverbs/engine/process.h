// This process on the host: its entry in the registry, its segment with the tables in it, its engine, and the peers
// that it has met. Made when the first device is opened; it lives until the process ends, as a real device would.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/engine/engine.h"
#include "softverbs/fabric/link.h"
#include "softverbs/host/arena.h"
#include "softverbs/host/host_registry.h"
#include "softverbs/host/process_view.h"
#include "softverbs/host/settings.h"
#include "softverbs/host/shared_table.h"
#include "softverbs/host/stats.h"

namespace verbatim::softverbs {

struct Context;
struct Cq;
struct Qp;
struct Srq;

class Process {
 public:
  // Joins on the first call, in a forked child again.
  static Result<Process*> join();
  // nullptr before the first join().
  static Process* joined();

  const Settings& settings() const { return settings_; }
  HostRegistry& registry() { return *registry_; }
  Incarnation me() const { return registry_->me(); }
  ProcessView& view() { return *view_; }
  Segment& segment() { return view_->segment(); }
  ObjectCounters& objects(ObjectKind kind) { return segment().counters.of(kind); }
  int segment_fd() const { return fd_.get(); }
  Arena& arena() { return arena_; }
  Engine& engine() { return engine_; }
  // Numbers work requests as they are posted.
  std::uint64_t next_arrival() { return arrivals_.fetch_add(1, std::memory_order_relaxed); }

  SharedTable& context_table() { return contexts_; }
  SharedTable& qp_table() { return qps_; }
  SharedTable& cq_table() { return cqs_; }
  SharedTable& srq_table() { return srqs_; }
  SharedTable& mr_table() { return mrs_; }

  // This process's own objects by their index in the segment, nullptr when gone. The caller keeps the object alive by
  // other means: the completion queue's lock, or the engine's hold on what it runs.
  Qp* qp_at(std::uint32_t index) const { return qp_pointers_[index].load(std::memory_order_acquire); }
  void publish(std::uint32_t index, Qp* qp);
  // Calls visit(Qp&) for a QP that may have gone; it cannot be destroyed meanwhile.
  template <typename Visit>
  void with_qp(std::uint32_t index, Visit visit) {
    MutexLock lock(qps_mutex_);
    if (Qp* qp = qp_at(index); qp != nullptr) visit(*qp);
  }
  // Calls visit(Qp&) for every live QP; none of them can be destroyed meanwhile.
  template <typename Visit>
  void for_each_qp(Visit visit) {
    MutexLock lock(qps_mutex_);
    const std::uint32_t end = qps_.high_water();
    for (std::uint32_t index = 0; index < end; ++index) {
      if (Qp* qp = qp_pointers_[index].load(std::memory_order_relaxed); qp != nullptr) visit(*qp);
    }
  }

  // Counts the QPs that the process creates, from 1: unlike their numbers it is the same in every run.
  std::uint32_t next_qp_ordinal() { return qps_created_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // Takes the fault script that tools/softverbs has left for this process, if there is a new one.
  void apply_fault_commands();
  // Keeps the counters of a QP that is about to go, for the report at the end.
  void record_counters(const Qp& qp);

  // The process that owns a QP; nullptr when it is gone.
  std::shared_ptr<ProcessView> find(const QpLocation& location);

 private:
  Process(const Settings& settings, std::unique_ptr<HostRegistry> registry, UniqueFd fd,
          std::shared_ptr<ProcessView> view);
  static Result<Process*> create();
  // After all that the program registered with atexit(), and the destructors of its objects: they may still use
  // devices.
  __attribute__((destructor)) static void leave_at_exit();
  static void reset_in_child();
  void write_stats();

  const Settings settings_;
  const std::unique_ptr<HostRegistry> registry_;
  const UniqueFd fd_;
  const std::shared_ptr<ProcessView> view_;
  Arena arena_;
  SharedTable contexts_;
  SharedTable qps_;
  SharedTable cqs_;
  SharedTable srqs_;
  SharedTable mrs_;
  std::vector<std::atomic<Qp*>> qp_pointers_;
  Mutex qps_mutex_;
  std::atomic<std::uint32_t> qps_created_{0};
  Mutex peers_mutex_;
  std::array<std::weak_ptr<ProcessView>, kMaxProcesses> peers_ VERBATIM_GUARDED_BY(peers_mutex_);
  Mutex destroyed_qps_mutex_;
  std::vector<QpStats> destroyed_qps_ VERBATIM_GUARDED_BY(destroyed_qps_mutex_);
  std::atomic<std::uint64_t> arrivals_{0};
  const std::unique_ptr<Link> link_;  // with SOFTVERBS_LINK_GBPS
  Engine engine_;
};

// For the rare verbs: the program called it. Before the process has opened a device nothing is counted.
void count(Verb verb);

}  // namespace verbatim::softverbs
