// Executes plans on the progress thread, as NCCL's progress thread does: it posts steps whose dependencies are met and
// tests the oldest request of each connection, in a loop, and never blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "memory/memory.h"
#include "netapi/plugin.h"
#include "ranks/connections.h"
#include "verbatim-perf/plan.h"
#include "workload/content.h"

namespace verbatim::perf {

class Progress {
 public:
  // `buffers` are indexed by Buffer and lie in `memory`.
  Progress(netapi::Plugin& plugin, const ranks::Connections& connections, memory::Memory& memory,
           std::vector<ranks::Piece> buffers, int pause_us)
      : plugin_(plugin),
        connections_(connections),
        memory_(memory),
        buffers_(std::move(buffers)),
        pause_us_(pause_us) {}

  // Stores a plan. run() may then be called any number of times.
  void prepare(const Plan& plan, const Arithmetic& arithmetic);

  // Runs the iterations one after the other: the next one starts when the previous one is complete on this rank. With
  // `overlap` each lane advances as far as its window and its dependencies allow. `finished` counts completed
  // iterations. `times_ns` gets the time of each iteration, without `overlap`; nullptr: not measured.
  void run(std::uint64_t iterations, bool overlap, std::atomic<std::uint64_t>& finished,
           std::vector<std::uint64_t>* times_ns);

 private:
  struct RunningLane {
    const Lane* lane;
    const ranks::Connection* connection;
    std::uint64_t total = 0;  // steps of this run
    std::uint64_t started = 0;
    std::uint64_t transferred = 0;  // the send or receive is done; the flush of a receive may be outstanding
    std::uint64_t completed = 0;
    std::uint64_t base = 0;  // number of the first step of the iteration that `started` is in
    // Of the steps from `completed` to `started` - 1: the send or receive, later its flush (null: none); index: step
    // modulo window.
    std::vector<void*> requests = {};
  };

  // Called after a poll without progress. Ranks may outnumber the cores, so an idle rank gives up the CPU.
  void back_off() const;
  void run_lanes(std::uint64_t iterations, std::atomic<std::uint64_t>* finished);
  // Starts at most one step per call. A device may do the work of a request inside the call that posts it (rxe does),
  // and a rank that posts a whole window of sends at once would delay the peer's next receives.
  bool start_step(RunningLane& running);
  bool may_start(const RunningLane& running, const Step& step) const;
  bool start(RunningLane& running, std::uint64_t step);
  bool complete_steps(RunningLane& running);
  bool test(const RunningLane& running, void* request, int* sizes) const;
  void check_sizes(const RunningLane& running, std::uint64_t step, const int* sizes) const;
  void* start_flush(const RunningLane& running, std::uint64_t step, int* sizes);
  void reduce(const RunningLane& running, std::uint64_t step) const;
  std::byte* address(Buffer buffer, std::size_t offset) const;

  netapi::Plugin& plugin_;
  const ranks::Connections& connections_;
  memory::Memory& memory_;
  const std::vector<ranks::Piece> buffers_;  // by Buffer
  const int pause_us_;
  Plan plan_;
  Arithmetic arithmetic_{};
  std::vector<RunningLane> lanes_;
};

}  // namespace verbatim::perf
