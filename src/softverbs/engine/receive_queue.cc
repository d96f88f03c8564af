#include "softverbs/engine/receive_queue.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <list>

#include "softverbs/engine/call.h"
#include "softverbs/engine/events.h"
#include "softverbs/engine/qp.h"

namespace verbatim::softverbs {
namespace {

constexpr std::size_t entry_bytes(std::uint32_t max_sge) {
  return sizeof(ReceiveEntry) + max_sge * sizeof(SharedSge);
}

}  // namespace

Status make_receive_ring(Process& process, std::uint32_t max_wr, std::uint32_t max_sge, ReceiveRing& ring,
                         ReceivePoster& poster) {
  const std::uint32_t count = std::bit_ceil(std::max(max_wr, 1U));
  Result<std::uint64_t> offset = process.arena().allocate(count * entry_bytes(max_sge));
  if (!offset) return offset.error();
  ring.posted.store(0, std::memory_order_relaxed);
  ring.consumed.store(0, std::memory_order_relaxed);
  ring.mask = count - 1;
  ring.max_sge = max_sge;
  ring.ring = *offset;
  poster.ring = &ring;
  poster.entries = at_offset<std::byte>(process.segment(), *offset);
  poster.max_wr = max_wr;
  poster.max_sge = max_sge;
  poster.released.store(0, std::memory_order_relaxed);
  return {};
}

void free_receive_ring(Process& process, ReceivePoster& poster) {
  if (poster.ring != nullptr) process.arena().release(poster.ring->ring);
  poster.ring = nullptr;
}

int post_receive(ReceivePoster& poster, const ibv_recv_wr& request, const Qp* qp) {
  if (request.num_sge < 0 || static_cast<std::uint32_t>(request.num_sge) > poster.max_sge) return EINVAL;
  const std::uint32_t posted = poster.ring->posted.load(std::memory_order_relaxed);
  if (posted - poster.released.load(std::memory_order_acquire) >= poster.max_wr) return ENOMEM;
  std::byte* to = poster.entries + (posted & poster.ring->mask) * entry_bytes(poster.max_sge);
  ReceiveEntry entry{request.wr_id, static_cast<std::uint16_t>(request.num_sge), 0, posted};
  if (Faults* all = faults(); all != nullptr) {
    const QpIdentity owner = qp != nullptr ? identity(*qp) : QpIdentity{};
    entry.fault = all->receive_fault(qp != nullptr ? &owner : nullptr);
  }
  std::memcpy(to, &entry, sizeof entry);
  to += sizeof entry;
  for (int i = 0; i < request.num_sge; ++i) {
    const ibv_sge& from = request.sg_list[i];
    const SharedSge sge{from.addr, from.length, from.lkey};
    std::memcpy(to, &sge, sizeof sge);
    to += sizeof sge;
  }
  // Sequentially consistent: either the caller then sees the error state, or the peer that sets it sees this entry.
  poster.ring->posted.store(posted + 1, std::memory_order_seq_cst);
  return 0;
}

bool consume_receive(Segment& segment, ReceiveRing& ring, OpenReceive& receive) {
  const std::uint32_t consumed = ring.consumed.load(std::memory_order_relaxed);
  if (ring.posted.load(std::memory_order_seq_cst) == consumed) return false;
  const std::byte* from = at_offset<std::byte>(segment, ring.ring) + (consumed & ring.mask) * entry_bytes(ring.max_sge);
  std::memcpy(&receive.entry, from, sizeof receive.entry);
  receive.entry.sge_count = std::min(receive.entry.sge_count, static_cast<std::uint16_t>(kMaxSge));
  std::memcpy(receive.sges, from + sizeof receive.entry, receive.entry.sge_count * sizeof(SharedSge));
  receive.filled = 0;
  receive.active = 1;
  ring.consumed.store(consumed + 1, std::memory_order_release);
  return true;
}

Result<Srq*> create_srq(Context& context, ibv_pd* pd, const ibv_srq_init_attr& attributes) {
  Process& process = *context.process;
  const Settings& limits = process.settings();
  const ibv_srq_attr& wanted = attributes.attr;
  if (wanted.max_wr < 1 || wanted.max_wr > limits.max_srq_wr || wanted.max_sge > limits.max_sge) {
    return system_error("create_srq", EINVAL);
  }
  auto srq = std::make_unique<Srq>();
  std::list<Srq*> listed{srq.get()};
  Result<std::uint32_t> index = process.srq_table().allocate(limits.max_srq);
  if (!index) return index.error();
  srq->process = &process;
  srq->index = *index;
  srq->shared = &process.segment().srqs[*index];
  const std::uint32_t max_sge = std::max(wanted.max_sge, 1U);
  if (Status made = make_receive_ring(process, wanted.max_wr, max_sge, srq->shared->ring, srq->poster); !made) {
    process.srq_table().release(*index);
    return made.error();
  }
  srq->context = &context.context;
  srq->srq_context = attributes.srq_context;
  srq->pd = pd;
  srq->handle = *index;
  pthread_mutex_init(&srq->mutex, nullptr);
  pthread_cond_init(&srq->cond, nullptr);
  srq->shared->pd = pd->handle;
  srq->shared->context = context.index;
  ++srq->shared->serial;
  reset(srq->shared->counters);
  srq->shared->alive.store(1, std::memory_order_release);
  srq->shared->limit = 0;
  static_cast<Pd*>(pd)->users.fetch_add(1, std::memory_order_relaxed);
  MutexLock lock(context.objects_mutex);
  srq->listed = listed.begin();
  context.srqs.splice(context.srqs.end(), listed);
  return srq.release();
}

int destroy_srq(Srq& srq) {
  if (srq.users.load(std::memory_order_acquire) != 0) return EBUSY;
  Context& context = context_of(srq.context);
  {
    MutexLock lock(context.objects_mutex);
    context.srqs.erase(srq.listed);
  }
  pthread_mutex_lock(&srq.mutex);
  while (srq.events_completed != srq.events_delivered) pthread_cond_wait(&srq.cond, &srq.mutex);
  pthread_mutex_unlock(&srq.mutex);
  static_cast<Pd*>(srq.pd)->users.fetch_sub(1, std::memory_order_release);
  ++srq.shared->serial;
  srq.shared->alive.store(0, std::memory_order_release);
  add_shared(srq.process->segment().counters.destroyed_srqs, srq.shared->counters);
  free_receive_ring(*srq.process, srq.poster);
  srq.process->srq_table().release(srq.index);
  pthread_cond_destroy(&srq.cond);
  pthread_mutex_destroy(&srq.mutex);
  delete &srq;
  return 0;
}

int modify_srq(Srq& srq, const ibv_srq_attr& attributes, int mask) {
  if ((mask & ~IBV_SRQ_LIMIT) != 0) return EINVAL;  // device_cap_flags does not contain IBV_DEVICE_SRQ_RESIZE
  if (attributes.srq_limit > srq.poster.max_wr) return EINVAL;
  if ((mask & IBV_SRQ_LIMIT) == 0) return 0;
  SharedLockGuard lock(srq.shared->lock, srq.process->me());
  srq.shared->limit = attributes.srq_limit;
  if (attributes.srq_limit == 0 || waiting_receives(srq.shared->ring) >= attributes.srq_limit) return 0;
  srq.shared->limit = 0;
  raise_event(srq.process->view(), srq.process->me(), srq.shared->context,
              {IBV_EVENT_SRQ_LIMIT_REACHED, EventTarget::kSrq, srq.index, srq.shared->serial});
  return 0;
}

int query_srq(Srq& srq, ibv_srq_attr& attributes) {
  SharedLockGuard lock(srq.shared->lock, srq.process->me());
  attributes.max_wr = srq.poster.max_wr;
  attributes.max_sge = srq.poster.max_sge;
  attributes.srq_limit = srq.shared->limit;
  return 0;
}

int post_srq_recv(ibv_srq* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
  Srq& srq = *static_cast<Srq*>(handle);
  if (const int refused = begin_data_call(kPostSrqRecvCall, context_of(srq.context).device); refused != 0) {
    *bad = request;
    return refused;
  }
  FutexLock lock(srq.poster.mutex);
  srq.shared->counters.posts.add(1);
  for (; request != nullptr; request = request->next) {
    if (const int error = post_receive(srq.poster, *request, nullptr); error != 0) {
      *bad = request;
      return error;
    }
    srq.shared->counters.requests.add(1);
  }
  return 0;
}

}  // namespace verbatim::softverbs
