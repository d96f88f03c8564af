// This process: its entry in the registry, its segment and the tables in it, its engine, and the peers that it has
// mapped. Created when the first device is opened and kept until the process ends, as a hardware device would be.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/engine/engine.h"
#include "softverbs/fabric/link.h"
#include "softverbs/faults/fault_states.h"
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

class Process final : private FaultActions {
 public:
  // Creates the process at the first call, and at the first call in a forked child.
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
  // The number of a work request in the order of posting.
  std::uint64_t next_arrival() { return arrivals_.fetch_add(1, std::memory_order_relaxed); }

  SharedTable& context_table() { return contexts_; }
  SharedTable& qp_table() { return qps_; }
  SharedTable& cq_table() { return cqs_; }
  SharedTable& srq_table() { return srqs_; }
  SharedTable& mr_table() { return mrs_; }

  // A QP of this process by its table index; nullptr when it is destroyed. The caller must keep the QP alive by other
  // means: the lock of its completion queue, or because the engine runs it.
  Qp* qp_at(std::uint32_t index) const { return qp_pointers_[index].load(std::memory_order_acquire); }
  void publish(std::uint32_t index, Qp* qp);
  // Calls visit(Qp&) unless the QP is destroyed. The QP cannot be destroyed during the call.
  template <typename Visit>
  void with_qp(std::uint32_t index, Visit visit) {
    MutexLock lock(qps_mutex_);
    if (Qp* qp = qp_at(index); qp != nullptr) visit(*qp);
  }
  // Calls visit(Qp&) for every QP. None of them can be destroyed during the calls.
  template <typename Visit>
  void for_each_qp(Visit visit) {
    MutexLock lock(qps_mutex_);
    const std::uint32_t end = qps_.high_water();
    for (std::uint32_t index = 0; index < end; ++index) {
      if (Qp* qp = qp_pointers_[index].load(std::memory_order_relaxed); qp != nullptr) visit(*qp);
    }
  }

  // Numbers the QPs of the process in the order of creation, from 1. Unlike QP numbers, these repeat in every run.
  std::uint32_t next_qp_ordinal() { return qps_created_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // Applies the fault command that tools/softverbs has sent to this process, if there is a new one. Without memory it
  // is left for the next call.
  void apply_fault_commands();
  // Keeps the counters of a QP that is being destroyed, for the statistics.
  void record_counters(const Qp& qp);

  // The process that owns a QP; nullptr when it has ended, or there is no memory to map its segment.
  std::shared_ptr<ProcessView> find(const QpLocation& location);

 private:
  Process(const Settings& settings, std::unique_ptr<HostRegistry> registry, UniqueFd fd,
          std::shared_ptr<ProcessView> view);
  static Result<Process*> create();
  // Runs after the atexit() functions and the destructors of the program, which may still use devices.
  __attribute__((destructor)) static void leave_at_exit();
  static void reset_in_child();
  std::shared_ptr<ProcessView> find_peer(const QpLocation& location);
  void write_stats();
  void report_unwritten_stats(int error) const;

  void set_alarm(std::uint64_t due_ns) override;
  void raise_device_event(std::uint32_t device, ibv_event_type type) override;
  void fail_qps(std::uint32_t device) override;

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
  const std::unique_ptr<Link> link_;  // nullptr without SOFTVERBS_LINK_GBPS
  Engine engine_;
};

// Counts a call of a rare verb. Calls before the process has opened a device are not counted.
void count(Verb verb);

}  // namespace verbatim::softverbs
