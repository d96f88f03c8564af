// Carries out plans on the progress thread, as NCCL's progress thread does: posts what may be posted, tests what is
// oldest on each connection, again and again, and never blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "netapi/plugin.h"
#include "ranks/connections.h"
#include "verbatim-perf/plan.h"
#include "workload/content.h"

namespace verbatim::perf {

class Progress {
 public:
  Progress(netapi::Plugin& plugin, const ranks::Connections& connections, std::vector<ranks::Piece> memory,
           workload::ElementType type, int pause_us)
      : plugin_(plugin), connections_(connections), memory_(std::move(memory)), type_(type), pause_us_(pause_us) {}

  // Takes a plan in; run() may then be called any number of times.
  void prepare(const Plan& plan);

  // Iterations one after the other: the next starts when all of the last one is complete on this rank. With `overlap`
  // each lane goes on as far as its window and dependencies let it. `finished` counts iterations as they end.
  void run(std::uint64_t iterations, bool overlap, std::atomic<std::uint64_t>& finished);

 private:
  struct RunningLane {
    const Lane* lane;
    const ranks::Connection* connection;
    std::uint64_t total = 0;  // steps of this run
    std::uint64_t started = 0;
    std::uint64_t completed = 0;
    std::uint64_t base = 0;            // steps of the iterations before the one that `started` is in
    std::vector<void*> requests = {};  // of steps completed to started - 1, by step modulo window
  };

  // When nothing has moved: ranks may outnumber the cores, and who has nothing to do lets the others run.
  void rest() const;
  void run_lanes(std::uint64_t iterations, std::atomic<std::uint64_t>* finished);
  // One a turn: a device may do a request's work within the call that posts it (rxe does), and whoever then posts a
  // whole window of sends in a row keeps the peer waiting for its next receives.
  bool start_step(RunningLane& running);
  bool may_start(const RunningLane& running, const Step& step) const;
  bool start(RunningLane& running, std::uint64_t step);
  bool complete_steps(RunningLane& running);
  void complete(const RunningLane& running, std::uint64_t step, const int* sizes);
  std::byte* address(Buffer buffer, std::size_t offset) const;

  netapi::Plugin& plugin_;
  const ranks::Connections& connections_;
  const std::vector<ranks::Piece> memory_;  // by Buffer
  const workload::ElementType type_;
  const int pause_us_;
  Plan plan_;
  std::vector<RunningLane> lanes_;
};

}  // namespace verbatim::perf
