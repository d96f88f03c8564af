#include "softverbs/engine/qp.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <list>

#include "base/log.h"
#include "softverbs/engine/call.h"
#include "softverbs/engine/completion_queue.h"
#include "softverbs/engine/datagrams.h"
#include "softverbs/engine/qp_transitions.h"
#include "softverbs/engine/receive_queue.h"
#include "softverbs/engine/requester.h"
#include "softverbs/engine/responder.h"
#include "softverbs/fabric/paths.h"
#include "softverbs/host/device_attributes.h"
#include "softverbs/memory/copier.h"

namespace verbatim::softverbs {
namespace {

bool is_capability_supported(const Settings& limits, const ibv_qp_cap& cap) {
  return cap.max_send_wr <= limits.max_qp_wr && cap.max_recv_wr <= limits.max_qp_wr &&
         cap.max_send_sge <= limits.max_sge && cap.max_recv_sge <= limits.max_sge &&
         cap.max_inline_data <= limits.max_inline_bytes;
}

void make_send_queue(SendQueue& queue, const ibv_qp_cap& cap) {
  const std::size_t count = std::bit_ceil(std::max(cap.max_send_wr, 1U));
  queue.requests = std::make_unique_for_overwrite<SendRequest[]>(count);
  queue.sges = std::make_unique_for_overwrite<ibv_sge[]>(count * cap.max_send_sge);
  queue.inline_bytes = std::make_unique_for_overwrite<std::uint8_t[]>(count * cap.max_inline_data);
  queue.mask = static_cast<std::uint32_t>(count - 1);
}

// Discards all posted requests without completions. The caller holds execution and shared->lock.
void empty_queues(Qp& qp) {
  SharedQp& shared = *qp.shared;
  if (shared.open.active != 0 && qp.srq != nullptr) {
    static_cast<Srq*>(qp.srq)->poster.released.fetch_add(1, std::memory_order_release);
  }
  shared.open.active = 0;
  shared.established = 0;
  shared.is_last_receive_due = 0;
  shared.unexecuted_packets = 0;
  shared.dest_qpn = 0;
  shared.path = shared.udp_source_port = 0;
  qp.requester = {};
  qp.deferred.clear();
}

void reset_qp(Qp& qp) {
  if (qp.copies) qp.copies->cancel();
  FutexLock sends(qp.sends.mutex);
  FutexLock receives(qp.receives.mutex);
  {
    SharedLockGuard lock(qp.shared->lock, qp.process->me());
    await_copies(qp.process->segment());  // the buffers of its receives belong to the program again
    qp.shared->state.store(IBV_QPS_RESET, std::memory_order_seq_cst);
    ++qp.shared->resets;
    empty_queues(qp);
  }
  purge_completions(*static_cast<Cq*>(qp.send_cq), qp.index);
  if (qp.recv_cq != qp.send_cq) purge_completions(*static_cast<Cq*>(qp.recv_cq), qp.index);
  for (std::atomic<std::uint32_t>* counter :
       {&qp.sends.posted, &qp.sends.sent, &qp.sends.executed, &qp.sends.released, &qp.receives.released}) {
    counter->store(0, std::memory_order_relaxed);
  }
  qp.shared->receives.posted.store(0, std::memory_order_relaxed);
  qp.shared->receives.consumed.store(0, std::memory_order_relaxed);
}

// Returns when no copy of GPU memory for the peer accesses memory of this process.
void await_arrivals(Qp& qp) {
  await_gpu_copies(qp.shared->arrivals);
  await_requested_copies(qp.process->segment());
}

bool are_values_valid(const Qp& qp, const ibv_qp_attr& attr, int mask) {
  constexpr unsigned kQpAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                 IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_OPTIONAL_RANGE;
  const auto has = [&](ibv_qp_attr_mask bit) { return (mask & bit) != 0; };
  if (has(IBV_QP_PORT) && attr.port_num != kPortNumber) return false;
  if (has(IBV_QP_PKEY_INDEX) && attr.pkey_index >= kPkeyTableLength) return false;
  if (has(IBV_QP_ACCESS_FLAGS) && (attr.qp_access_flags & ~kQpAccess) != 0) return false;
  if (has(IBV_QP_AV) && !is_path_valid(qp.process->segment().ports[qp.shared->device], attr.ah_attr)) return false;
  if (has(IBV_QP_PATH_MTU) &&
      (attr.path_mtu < IBV_MTU_256 || mtu_bytes(attr.path_mtu) > qp.process->settings().mtu_bytes)) {
    return false;
  }
  if (has(IBV_QP_DEST_QPN) && attr.dest_qp_num > k24Bits) return false;
  if (has(IBV_QP_MAX_QP_RD_ATOMIC) && attr.max_rd_atomic > kMaxRdAtomic) return false;
  if (has(IBV_QP_MAX_DEST_RD_ATOMIC) && attr.max_dest_rd_atomic > kMaxRdAtomic) return false;
  if (has(IBV_QP_MIN_RNR_TIMER) && attr.min_rnr_timer > 31) return false;
  if (has(IBV_QP_TIMEOUT) && attr.timeout > 31) return false;
  if (has(IBV_QP_RETRY_CNT) && attr.retry_cnt > 7) return false;
  if (has(IBV_QP_RNR_RETRY) && attr.rnr_retry > 7) return false;
  return !has(IBV_QP_ALT_PATH);  // path migration is not supported
}

// Both ends of a connection do this, so that a connection which cannot work is reported at both.
void report_unreachable_peer(const Qp& qp, std::uint32_t peer) {
  const HostRegistry& registry = qp.process->registry();
  const Reach reach = registry.reach(peer);
  static std::atomic<bool> is_no_copy_reported{false};
  static std::atomic<bool> is_unknown_reported{false};
  if (reach == Reach::kYes) return;
  if (reach == Reach::kNoCopy) {
    if (is_no_copy_reported.exchange(true)) return;
    VERBATIM_WARN(
        "QP %u cannot exchange data with its peer, QP %u: that process is in another PID namespace (container) or in "
        "an unknown one (no /proc). Next: set SOFTVERBS_ENGINE=thread in both processes, or run both in one PID "
        "namespace (docker --pid) with /proc",
        qp.qp_num, peer);
    return;
  }
  if (is_unknown_reported.exchange(true)) return;
  VERBATIM_WARN(
      "QP %u cannot reach its peer, QP %u: no process that shares %.*s with this one has that QP, or the peer has "
      "ended. Processes see each other if they run on one host, as one user, with the same SOFTVERBS_NAMESPACE, and in "
      "one PID namespace (container). Next: for several containers set SOFTVERBS_DIRECTORY to one directory that all "
      "of them can write to (docker -v)",
      qp.qp_num, peer, static_cast<int>(registry.directory().size()), registry.directory().data());
}

// Stores the given attributes. The caller holds execution and shared->lock.
void apply(Qp& qp, ibv_qp_attr& kept, const ibv_qp_attr& given, int mask) {
  SharedQp& shared = *qp.shared;
  Requester& requester = qp.requester;
  const auto has = [&](ibv_qp_attr_mask bit) { return (mask & bit) != 0; };
  if (has(IBV_QP_PORT)) kept.port_num = given.port_num;
  if (has(IBV_QP_PKEY_INDEX)) kept.pkey_index = given.pkey_index;
  if (has(IBV_QP_ACCESS_FLAGS)) shared.access = kept.qp_access_flags = given.qp_access_flags;
  if (has(IBV_QP_AV)) requester.path = kept.ah_attr = given.ah_attr;
  if (has(IBV_QP_PATH_MTU)) {
    kept.path_mtu = given.path_mtu;
    shared.path_mtu_bytes = requester.mtu_bytes = mtu_bytes(given.path_mtu);
  }
  if (has(IBV_QP_QKEY)) {
    kept.qkey = given.qkey;
    shared.qkey.store(given.qkey, std::memory_order_relaxed);
  }
  // A datagram may have the size of the port's MTU.
  if (qp.qp_type == IBV_QPT_UD) shared.path_mtu_bytes = requester.mtu_bytes = qp.process->settings().mtu_bytes;
  if (has(IBV_QP_DEST_QPN)) shared.dest_qpn = requester.dest_qpn = kept.dest_qp_num = given.dest_qp_num;
  if (has(IBV_QP_AV)) {
    const PathChoice choice = choose_path(qp.process->segment().ports[shared.device], kept.ah_attr, qp.qp_num,
                                          kept.dest_qp_num, qp.process->settings().paths);
    shared.path = 1 + choice.path;
    shared.udp_source_port = choice.udp_source_port;
  }
  if (has(IBV_QP_RQ_PSN)) shared.expected_psn = kept.rq_psn = given.rq_psn & k24Bits;
  if (has(IBV_QP_SQ_PSN)) requester.psn = kept.sq_psn = given.sq_psn & k24Bits;
  if (has(IBV_QP_MAX_QP_RD_ATOMIC)) requester.max_rd_atomic = kept.max_rd_atomic = given.max_rd_atomic;
  if (has(IBV_QP_MAX_DEST_RD_ATOMIC)) {
    shared.max_dest_rd_atomic = kept.max_dest_rd_atomic = given.max_dest_rd_atomic;
  }
  if (has(IBV_QP_MIN_RNR_TIMER)) shared.min_rnr_timer = kept.min_rnr_timer = given.min_rnr_timer;
  if (has(IBV_QP_TIMEOUT)) requester.timeout = kept.timeout = given.timeout;
  if (has(IBV_QP_RETRY_CNT)) {
    requester.retry_count = requester.retries_left = kept.retry_cnt = given.retry_cnt;
  }
  if (has(IBV_QP_RNR_RETRY)) {
    requester.rnr_retry_count = requester.rnr_retries_left = kept.rnr_retry = given.rnr_retry;
  }
  if (has(IBV_QP_EN_SQD_ASYNC_NOTIFY)) requester.drain_event_pending = given.en_sqd_async_notify != 0;
}

// As drivers of NICs do (mlx5, rxe): the PSN of the next packet, not the one that was set. The caller holds
// shared->lock.
std::uint32_t queried_rq_psn(const Qp& qp, ibv_qp_attr& kept) {
  const SharedQp& shared = *qp.shared;
  const bool has_failed = qp.current_state() == IBV_QPS_ERR;
  switch (qp.process->settings().rq_psn) {
    case RqPsn::kExact:
      break;
    case RqPsn::kZero:
      if (has_failed) return 0;
      break;
    case RqPsn::kCached:
      if (!has_failed) kept.rq_psn = shared.expected_psn;
      return kept.rq_psn;
    case RqPsn::kSet:
      return kept.rq_psn;
    case RqPsn::kAccepted:
      if (has_failed && shared.unexecuted_psn == shared.expected_psn)
        return (shared.expected_psn + shared.unexecuted_packets) & k24Bits;
      break;
  }
  return shared.expected_psn;
}

}  // namespace

Qp::~Qp() = default;

bool is_path_valid(const SharedPort& port, const ibv_ah_attr& path) {
  if (path.port_num != kPortNumber || path.sl > 15) return false;
  if (path.is_global == 0) return port.ethernet == 0 && port.grh_required == 0 && path.dlid != 0;
  return path.grh.sgid_index < kGidTableLength && port.gids()[path.grh.sgid_index].valid != 0;
}

Result<Qp*> create_qp(Context& context, ibv_pd* pd, ibv_qp_init_attr& wanted) {
  Process& process = *context.process;
  const Settings& limits = process.settings();
  if (wanted.qp_type != IBV_QPT_RC && wanted.qp_type != IBV_QPT_UC && wanted.qp_type != IBV_QPT_UD) {
    return system_error("create_qp", EOPNOTSUPP);
  }
  if (wanted.send_cq == nullptr || wanted.recv_cq == nullptr || !is_capability_supported(limits, wanted.cap)) {
    return system_error("create_qp", EINVAL);
  }
  const ibv_context* const own = &context.context;
  if (wanted.send_cq->context != own || wanted.recv_cq->context != own ||
      (wanted.srq != nullptr && wanted.srq->context != own)) {
    return system_error("create_qp", EINVAL);
  }
  auto qp = std::make_unique<Qp>();
  qp->cap = wanted.cap;
  qp->cap.max_send_sge = std::max(wanted.cap.max_send_sge, 1U);
  qp->cap.max_recv_sge = std::max(wanted.cap.max_recv_sge, 1U);
  if (wanted.srq != nullptr) qp->cap.max_recv_wr = qp->cap.max_recv_sge = 0;
  make_send_queue(qp->sends, qp->cap);
  if (wanted.qp_type == IBV_QPT_UD) {
    qp->datagrams = std::make_unique<Datagrams>();
    qp->datagrams->addresses = std::make_unique<DatagramAddress[]>(qp->sends.mask + std::size_t{1});
  }
  // Only a reliable connection can put packets that overtake each other in order again.
  const bool is_deferring = limits.adaptive_routing && wanted.qp_type == IBV_QPT_RC;
  if (is_deferring) qp->deferred.enable();
  std::list<Qp*> listed{qp.get()};
  Result<std::uint32_t> index = process.qp_table().allocate(limits.max_qp);
  if (!index) return index.error();
  // Nothing throws any more, because there is more to undo than memory.
  Result<std::uint32_t> qpn = process.registry().allocate_qpn(*index);
  if (!qpn) {
    process.qp_table().release(*index);
    return qpn.error();
  }
  qp->index = *index;
  qp->ordinal = process.next_qp_ordinal();
  SharedQp& shared = process.segment().qps[*index];
  if (wanted.srq == nullptr) {
    if (Status made =
            make_receive_ring(process, qp->cap.max_recv_wr, qp->cap.max_recv_sge, shared.receives, qp->receives);
        !made) {
      process.registry().release_qpn(*qpn);
      process.qp_table().release(*index);
      return made.error();
    }
  }

  qp->context = &context.context;
  qp->qp_context = wanted.qp_context;
  qp->pd = pd;
  qp->send_cq = wanted.send_cq;
  qp->recv_cq = wanted.recv_cq;
  qp->srq = wanted.srq;
  qp->handle = *index;
  qp->qp_num = *qpn;
  qp->ibv_qp::state = IBV_QPS_RESET;
  qp->qp_type = wanted.qp_type;
  pthread_mutex_init(&qp->ibv_qp::mutex, nullptr);
  pthread_cond_init(&qp->cond, nullptr);
  qp->process = &process;
  qp->shared = &shared;
  qp->signal_all = wanted.sq_sig_all != 0;
  // Seeded by index: a program that repeats its steps gets the same order of payloads, whatever its QP numbers are.
  if (is_deferring) qp->deferred.seed(std::uint64_t{limits.seed} << 32 | *index);

  static_cast<Pd*>(pd)->users.fetch_add(1, std::memory_order_relaxed);
  static_cast<Cq*>(wanted.send_cq)->users.fetch_add(1, std::memory_order_relaxed);
  static_cast<Cq*>(wanted.recv_cq)->users.fetch_add(1, std::memory_order_relaxed);
  if (wanted.srq != nullptr) static_cast<Srq*>(wanted.srq)->users.fetch_add(1, std::memory_order_relaxed);
  reset(shared.counters);
  {
    SharedLockGuard lock(shared.lock, process.me());
    shared.state.store(IBV_QPS_RESET, std::memory_order_relaxed);
    shared.context = context.index;
    shared.device = context.device;
    shared.type = wanted.qp_type;
    shared.peer_port.store(0, std::memory_order_relaxed);
    shared.pd = pd->handle;
    shared.send_cq = static_cast<Cq*>(wanted.send_cq)->index;
    shared.recv_cq = static_cast<Cq*>(wanted.recv_cq)->index;
    shared.srq = wanted.srq != nullptr ? static_cast<Srq*>(wanted.srq)->index : kNoIndex;
    shared.access = 0;
    empty_queues(*qp);
    shared.qpn.store(*qpn, std::memory_order_release);
  }
  process.publish(*index, qp.get());
  wanted.cap = qp->cap;
  MutexLock lock(context.objects_mutex);
  qp->listed = listed.begin();
  context.qps.splice(context.qps.end(), listed);
  return qp.release();
}

int destroy_qp(Qp& qp) {
  Process& process = *qp.process;
  Context& context = context_of(qp.context);
  {
    MutexLock lock(context.objects_mutex);
    context.qps.erase(qp.listed);
  }
  {
    SharedLockGuard execution(qp.execution, process.me());
    process.record_counters(qp);
    reset_qp(qp);
    SharedLockGuard lock(qp.shared->lock, process.me());
    qp.shared->qpn.store(0, std::memory_order_release);
  }
  await_arrivals(qp);
  process.publish(qp.index, nullptr);
  process.engine().remove(qp);
  process.registry().release_qpn(qp.qp_num);
  pthread_mutex_lock(&qp.ibv_qp::mutex);
  while (qp.events_completed != qp.events_delivered) pthread_cond_wait(&qp.cond, &qp.ibv_qp::mutex);
  pthread_mutex_unlock(&qp.ibv_qp::mutex);

  free_receive_ring(process, qp.receives);
  static_cast<Pd*>(qp.pd)->users.fetch_sub(1, std::memory_order_release);
  static_cast<Cq*>(qp.send_cq)->users.fetch_sub(1, std::memory_order_release);
  static_cast<Cq*>(qp.recv_cq)->users.fetch_sub(1, std::memory_order_release);
  if (qp.srq != nullptr) static_cast<Srq*>(qp.srq)->users.fetch_sub(1, std::memory_order_release);
  process.qp_table().release(qp.index);
  pthread_cond_destroy(&qp.cond);
  pthread_mutex_destroy(&qp.ibv_qp::mutex);
  delete &qp;
  return 0;
}

int modify_qp(Qp& qp, const ibv_qp_attr& given, int mask) {
  MutexLock modify(qp.modify_mutex);
  qp.shared->counters.modifies.add(1);
  const ibv_qp_state from = qp.current_state();
  const ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? given.qp_state : from;
  if ((mask & IBV_QP_CUR_STATE) != 0 && given.cur_qp_state != from) return EINVAL;
  if (!is_transition_allowed(qp.qp_type, from, to, mask) || !are_values_valid(qp, given, mask)) return EINVAL;
  if (to == IBV_QPS_RESET) qp.was_reset = true;
  if (from == IBV_QPS_RESET && to == IBV_QPS_INIT && qp.was_reset && !qp.process->settings().reuses_qps) return EINVAL;
  {
    SharedLockGuard execution(qp.execution, qp.process->me());
    if (to == IBV_QPS_RESET) {
      reset_qp(qp);
      qp.attributes = {};
    } else if (to == IBV_QPS_ERR) {
      fail_own_qp(qp);
    } else {
      SharedLockGuard lock(qp.shared->lock, qp.process->me());
      if (qp.current_state() != from) return EINVAL;  // a peer has moved the QP to the error state meanwhile
      apply(qp, qp.attributes, given, mask);
      qp.shared->state.store(to, std::memory_order_seq_cst);
    }
  }
  // The memory that the peer writes belongs to the program again. Without qp.execution: the engine that copies may be
  // about to run this QP.
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) await_arrivals(qp);
  qp.ibv_qp::state = to;
  if (from == IBV_QPS_INIT && to == IBV_QPS_RTR && qp.qp_type != IBV_QPT_UD)
    report_unreachable_peer(qp, given.dest_qp_num);
  if (to == IBV_QPS_RTS || to == IBV_QPS_SQD) qp.process->engine().submit_now(qp);
  return 0;
}

int query_qp(Qp& qp, ibv_qp_attr& attributes, ibv_qp_init_attr& init) {
  MutexLock modify(qp.modify_mutex);
  qp.shared->counters.queries.add(1);
  attributes = qp.attributes;
  attributes.path_mig_state = IBV_MIG_MIGRATED;
  attributes.cap = qp.cap;
  {
    SharedLockGuard lock(qp.shared->lock, qp.process->me());
    attributes.qp_state = attributes.cur_qp_state = qp.ibv_qp::state = qp.current_state();
    attributes.rq_psn = queried_rq_psn(qp, qp.attributes);
  }
  init = {};
  init.qp_context = qp.qp_context;
  init.send_cq = qp.send_cq;
  init.recv_cq = qp.recv_cq;
  init.srq = qp.srq;
  init.cap = qp.cap;
  init.qp_type = qp.qp_type;
  init.sq_sig_all = qp.signal_all ? 1 : 0;
  return 0;
}

int post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
  Qp& qp = *static_cast<Qp*>(handle);
  if (const int refused = begin_data_call(kPostRecvCall, qp.shared->device); refused != 0) {
    *bad = request;
    return refused;
  }
  if (qp.srq != nullptr || qp.current_state() == IBV_QPS_RESET) {
    *bad = request;
    return EINVAL;
  }
  int error = 0;
  {
    FutexLock lock(qp.receives.mutex);
    qp.shared->counters.receives.posts.add(1);
    for (; request != nullptr && error == 0; request = error == 0 ? request->next : request) {
      error = post_receive(qp.receives, *request, &qp);
      if (error != 0) {
        *bad = request;
      } else {
        qp.shared->counters.receives.requests.add(1);
      }
    }
  }
  if (qp.shared->state.load(std::memory_order_seq_cst) == IBV_QPS_ERR) {
    SharedLockGuard lock(qp.shared->lock, qp.process->me());
    if (qp.current_state() == IBV_QPS_ERR) flush_receives(qp.process->view(), qp.process->me(), qp.index);
  }
  qp.process->engine().progress();
  return error;
}

}  // namespace verbatim::softverbs
