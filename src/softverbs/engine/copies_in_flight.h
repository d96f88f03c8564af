// WRITEs whose bytes GPUs copy at this moment: sent and accepted by the peer's QP, not yet complete. They complete in
// the order of the requests, each when its bytes are in memory. Only the engine with threads begins WRITEs before
// earlier ones are complete; everything else waits until no copy is under way.
#pragma once

#include <cstdint>
#include <list>

#include "softverbs/engine/packets.h"
#include "softverbs/memory/gpu_copies.h"

namespace verbatim::softverbs {

class Process;
struct Attempt;
struct Qp;
struct SendRequest;

// Of one QP. Guarded by Qp::execution.
struct CopiesInFlight {
  GpuCopies copies;
  std::list<Packets> steps;             // one for each copy
  std::uint32_t receives_consumed = 0;  // by the steps that are under way

  explicit CopiesInFlight(const HostRegistry& registry) : copies(registry, false) {}
  bool empty() const { return steps.empty(); }
  // Whether another step may be begun: enough copies in flight keep the copy engines busy.
  bool has_room() const;
  void remove_oldest();
  void cancel();
};

bool is_copying(const Qp& qp);
CopiesInFlight& copies_of(Qp& qp);  // made at the first call
// Whether the WRITE may be begun while earlier ones are under way. Faults, rates and adaptive routing decide about
// single packets; with them one step is executed after the other.
bool may_begin_ahead(const Qp& qp, const SendRequest& request);
// Ends the oldest step, whose copy has ended in `state`: delivers its immediate, or fails.
Attempt finish_write(Qp& qp, const Packets& packets, GpuCopies::State state);

// Return when no copy that had begun before accesses memory of this process any more.
void await_gpu_copies(CopyProgress& progress);
void await_gpu_copies(Process& process);

}  // namespace verbatim::softverbs
