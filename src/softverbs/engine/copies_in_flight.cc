#include "softverbs/engine/copies_in_flight.h"

#include <sched.h>

#include "base/clock.h"
#include "softverbs/engine/attempt.h"
#include "softverbs/engine/qp.h"
#include "softverbs/faults/faults.h"

namespace verbatim::softverbs {
namespace {

constexpr std::size_t kMaxCopies = 64;
constexpr std::uint64_t kMaxBytes = 8U << 20;

bool consumes_receive(const Packets& write) {
  return write.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && write.is_last();
}

bool has_settled(const CopyProgress& progress, std::uint32_t begun) {
  return static_cast<std::int32_t>(progress.settled.load(std::memory_order_acquire) - begun) >= 0;
}

void await_settled(CopyProgress& progress, std::uint32_t begun) {
  while (!has_settled(progress, begun)) {
    if (!is_alive(progress.copier.load(std::memory_order_relaxed))) {
      // What it had begun ended with it. Another thread may have seen this before, and a new peer may have copied
      // since.
      std::uint32_t settled = progress.settled.load(std::memory_order_relaxed);
      while (static_cast<std::int32_t>(settled - begun) < 0 &&
             !progress.settled.compare_exchange_weak(settled, begun, std::memory_order_relaxed)) {
      }
      return;
    }
    sched_yield();
  }
}

}  // namespace

bool CopiesInFlight::has_room() const {
  return copies.size() < kMaxCopies && copies.bytes() < kMaxBytes;
}

void CopiesInFlight::remove_oldest() {
  if (consumes_receive(steps.front())) --receives_consumed;
  steps.pop_front();
  copies.remove_oldest();
}

void CopiesInFlight::cancel() {
  copies.cancel();
  steps.clear();
  receives_consumed = 0;
}

bool is_copying(const Qp& qp) {
  return qp.copies && !qp.copies->empty();
}

CopiesInFlight& copies_of(Qp& qp) {
  if (!qp.copies) qp.copies = std::make_unique<CopiesInFlight>(qp.process->registry());
  return *qp.copies;
}

bool may_begin_ahead(const Qp& qp, const SendRequest& request) {
  const Settings& settings = qp.process->settings();
  return (request.opcode == IBV_WR_RDMA_WRITE || request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) && settings.threaded &&
         !settings.has_rate() && !qp.deferred.is_enabled() && faults() == nullptr && qp.qp_type == IBV_QPT_RC;
}

Attempt finish_write(Qp& qp, const Packets& packets, GpuCopies::State state) {
  if (state == GpuCopies::State::kSourceFailed) return failed(IBV_WC_LOC_PROT_ERR);
  if (state == GpuCopies::State::kTargetDead) return {Outcome::kLost};
  if (state == GpuCopies::State::kDone && !consumes_receive(packets)) return {};
  if (const Outcome found = find_peer(qp); found != Outcome::kDone) return {found};
  const Route& route = qp.requester.route;
  const Incarnation me = qp.process->me();
  if (!route.qp->lock.lock_within(me, kYieldsForPeerLock)) return {Outcome::kBusy};
  Response response = Response::kNoResponse;
  if (route.qp->qpn.load(std::memory_order_relaxed) == qp.requester.dest_qpn && !is_unreachable(qp, faults())) {
    response = finish_copied_write(*route.process, me, route.index, packets, state == GpuCopies::State::kDone);
  }
  Attempt result = attempt_of(response);
  result.rnr_timer = route.qp->min_rnr_timer;
  route.qp->lock.unlock(me);
  return result;
}

void await_gpu_copies(CopyProgress& progress) {
  await_settled(progress, progress.begun.load(std::memory_order_seq_cst));
}

void await_gpu_copies(Process& process) {
  // Not in for_each_qp, whose lock the engine may need before it goes on with the copies. Those of a QP that was
  // destroyed have settled.
  for (std::uint32_t index = 0; index < process.qp_table().high_water(); ++index) {
    SharedQp& qp = process.segment().qps[index];
    await_gpu_copies(qp.sends);
    await_gpu_copies(qp.arrivals);
  }
}

}  // namespace verbatim::softverbs
