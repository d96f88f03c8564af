#include "softverbs/engine/attempt.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/clock.h"
#include "softverbs/engine/memory_region.h"
#include "softverbs/memory/copier.h"

namespace verbatim::softverbs {
namespace {

// Whether a path from port `from` leads to `port`. Within an InfiniBand subnet the LID decides, between subnets the
// FLID; a port that demands a GRH drops packets without one.
bool is_addressed(const SharedPort& port, const SharedPort& from, const ibv_ah_attr& path) {
  if (port.ethernet == 0 && path.dlid != (port.subnet == from.subnet ? port.lid : port.flid)) return false;
  if (path.is_global == 0) return port.ethernet == 0 && port.subnet == from.subnet && port.grh_required == 0;
  return std::any_of(port.gids(), port.gids() + kGidTableLength, [&](const SharedGid& entry) {
    return entry.valid != 0 && std::memcmp(&entry.gid, &path.grh.dgid, sizeof(ibv_gid)) == 0;
  });
}

std::uint64_t fast_path_bytes(const Qp& qp) {
  const Settings& settings = qp.process->settings();
  const bool is_excluded =
      settings.threaded || settings.has_rate() || qp.deferred.is_enabled() || settings.late_host_ms != 0;
  return is_excluded || qp.qp_type != IBV_QPT_RC ? 0 : std::min<std::uint64_t>(kStepBytes, settings.max_msg_bytes);
}

bool find_route(Qp& qp) {
  Requester& requester = qp.requester;
  Route& route = requester.route;
  if (route.process && route.qp->qpn.load(std::memory_order_acquire) == requester.dest_qpn) return true;
  route = {};
  const std::optional<QpLocation> location = qp.process->registry().find_qpn(requester.dest_qpn);
  if (!location) return false;
  std::shared_ptr<ProcessView> process = qp.process->find(*location);
  if (!process) return false;
  SharedQp& target = process->segment().qps[location->index];
  if (target.type != qp.shared->type) return false;
  const SharedPort& from = qp.process->segment().ports[qp.shared->device];
  if (!is_addressed(process->segment().ports[target.device], from, requester.path)) return false;
  const bool is_own = process->is_own();
  requester.peer_slot = location->slot;
  requester.peer_device = target.device;
  qp.shared->peer_port.store(target.device + 1, std::memory_order_relaxed);
  requester.peer_pid = process->pid();
  route = {std::move(process), &target, location->index, is_own ? fast_path_bytes(qp) : 0};
  return true;
}

// False while the peer's copier starts. Where the peer's memory is never accessible, the copy itself fails.
bool is_memory_accessible(const Qp& qp) {
  ProcessView& process = *qp.requester.route.process;
  return process.copy_path(qp.process->settings()) != ProcessView::CopyPath::kThroughSegment ||
         is_copier_ready(process);
}

// Whether a fault of this process keeps packets from passing: its port is down, or it is separated from the peer's.
bool is_kept_by_own_faults(const Qp& qp, Faults* faults) {
  const Route& route = qp.requester.route;
  return faults != nullptr &&
         faults->states().is_unreachable(qp.shared->device, route.process->pid(), route.qp->device);
}

}  // namespace

Attempt attempt_of(Response response) {
  switch (response) {
    case Response::kAck:
    case Response::kDuplicateAck:
      return {Outcome::kDone};
    case Response::kBegun:
      return {.is_begun = true};
    case Response::kAfterCopies:
      return {Outcome::kBusy};
    case Response::kNoResponse:
      return {Outcome::kLost};
    case Response::kReceiverNotReady:
      return {Outcome::kNotReady};
    case Response::kSourceFault:
      return failed(IBV_WC_LOC_PROT_ERR);
    case Response::kInvalidRequest:
      return failed(IBV_WC_REM_INV_REQ_ERR);
    case Response::kAccessError:
      return failed(IBV_WC_REM_ACCESS_ERR);
    case Response::kOperationalError:
      return failed(IBV_WC_REM_OP_ERR);
  }
  return failed(IBV_WC_GENERAL_ERR);
}

bool gather_local(const Qp& qp, std::uint32_t slot, const SendRequest& request, const Packets& packets, Spans& spans) {
  if ((request.flags & IBV_SEND_INLINE) != 0) {
    const std::uint8_t* bytes = &qp.sends.inline_bytes[std::size_t{slot} * qp.cap.max_inline_data];
    spans.add(reinterpret_cast<std::uintptr_t>(bytes) + packets.offset, packets.bytes);
    return true;
  }
  const bool is_written = request.opcode == IBV_WR_RDMA_READ || is_atomic(request.opcode);
  const std::uint32_t access = is_written ? std::uint32_t{IBV_ACCESS_LOCAL_WRITE} : 0;
  const ibv_sge* sges = &qp.sends.sges[std::size_t{slot} * std::max(qp.cap.max_send_sge, 1U)];
  std::uint64_t skip = packets.offset;
  std::uint64_t left = packets.bytes;
  for (std::uint32_t i = 0; i < request.sge_count && left > 0; ++i) {
    if (skip >= sges[i].length) {
      skip -= sges[i].length;
      continue;
    }
    const std::uint64_t bytes = std::min<std::uint64_t>(sges[i].length - skip, left);
    const std::uint64_t begin = translate(qp.process->segment(), {KeyKind::kLocal, sges[i].lkey, qp.pd->handle, access},
                                          sges[i].addr + skip, bytes);
    if (begin == 0) return false;
    spans.add(begin, bytes);
    skip = 0;
    left -= bytes;
  }
  return true;
}

Outcome find_peer(Qp& qp) {
  if (!find_route(qp)) return Outcome::kLost;
  ProcessView& process = *qp.requester.route.process;
  if (!process.is_own() && !process.is_alive(monotonic_ns())) {
    qp.requester.route = {};
    return Outcome::kLost;
  }
  return is_memory_accessible(qp) ? Outcome::kDone : Outcome::kBusy;
}

bool is_unreachable(const Qp& qp, Faults* faults) {
  const Route& route = qp.requester.route;
  const Segment& peer = route.process->segment();
  if (peer.impaired.load(std::memory_order_acquire) != 0 && !is_port_open(peer, route.qp->device, qp.shared->device)) {
    return true;
  }
  return is_kept_by_own_faults(qp, faults);
}

bool is_lost_before_target(const Qp& qp, Faults* faults) {
  const Route& route = qp.requester.route;
  const Segment& peer = route.process->segment();
  const std::uint32_t unreachable = peer.ports[route.qp->device].unreachable.load(std::memory_order_acquire);
  return peer.frozen.load(std::memory_order_acquire) != 0 || (unreachable >> qp.shared->device & 1) != 0 ||
         is_kept_by_own_faults(qp, faults);
}

}  // namespace verbatim::softverbs
