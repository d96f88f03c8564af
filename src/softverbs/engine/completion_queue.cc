#include "softverbs/engine/completion_queue.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <list>

#include "base/clock.h"
#include "softverbs/engine/call.h"
#include "softverbs/engine/events.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/qp.h"

namespace verbatim::softverbs {
namespace {

// Programs poll without a pause. After this many empty polls in a row the thread yields its core: with fewer cores than
// polling threads, the thread that produces the completion needs it.
constexpr std::uint32_t kEmptyPollsPerYield = 32;

constexpr std::uint64_t kMaxResizeWaitNs = 100 * kNanosecondsPerMillisecond;

}  // namespace

void notify(const ProcessView& process, SharedCq& cq, bool failed, bool solicited) {
  Armed armed = cq.armed.load(std::memory_order_seq_cst);
  do {
    if (armed == Armed::kNo) return;
    if (armed == Armed::kSolicited && !solicited && !failed) return;
  } while (!cq.armed.compare_exchange_weak(armed, Armed::kNo));
  if (cq.channel_fd < 0) return;
  cq.unread_events.fetch_add(1, std::memory_order_release);
  if (wake_channel(process, cq)) return;
  // The program was not woken, so the queue is armed again and the next completion tries again. The owner may have read
  // the event after a byte of another queue.
  std::uint32_t unread = cq.unread_events.load(std::memory_order_relaxed);
  while (unread != 0 && !cq.unread_events.compare_exchange_weak(unread, unread - 1)) {
  }
  Armed disarmed = Armed::kNo;
  if (unread != 0) cq.armed.compare_exchange_strong(disarmed, armed);
}

void overrun(const ProcessView& process, Incarnation me, std::uint32_t cq_index) {
  SharedCq& cq = process.segment().cqs[cq_index];
  cq.overrun.store(1, std::memory_order_relaxed);
  raise_event(process, me, cq.context, {IBV_EVENT_CQ_ERR, EventTarget::kCq, cq_index, cq.serial});
}

Result<Cq*> create_cq(Context& context, int entries, void* cq_context, ibv_comp_channel* channel) {
  Process& process = *context.process;
  const Settings& limits = process.settings();
  if (entries < 1 || static_cast<std::uint32_t>(entries) > limits.max_cqe) return system_error("create_cq", EINVAL);
  const std::uint32_t count = std::bit_ceil(static_cast<std::uint32_t>(entries));
  auto cq = std::make_unique<Cq>();
  std::list<Cq*> listed{cq.get()};
  Result<std::uint32_t> index = process.cq_table().allocate(limits.max_cq);
  if (!index) return index.error();
  Result<std::uint64_t> ring = process.arena().allocate(count * sizeof(Cqe));
  if (!ring) {
    process.cq_table().release(*index);
    return ring.error();
  }
  cq->context = &context.context;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->handle = *index;
  cq->cqe = static_cast<int>(count);
  pthread_mutex_init(&cq->mutex, nullptr);
  pthread_cond_init(&cq->cond, nullptr);
  cq->process = &process;
  cq->index = *index;
  cq->shared = &process.segment().cqs[*index];
  cq->ring = at_offset<Cqe>(process.segment(), *ring);

  SharedCq& shared = *cq->shared;
  shared.tail.store(0, std::memory_order_relaxed);
  shared.head.store(0, std::memory_order_relaxed);
  shared.mask = count - 1;
  ++shared.serial;
  reset(shared.counters);
  shared.unwritten_events.store(0, std::memory_order_relaxed);
  shared.alive.store(1, std::memory_order_release);
  shared.ring = *ring;
  shared.context = context.index;
  shared.is_stamped = 0;
  shared.channel_fd = channel != nullptr ? static_cast<Channel*>(channel)->pipe.write_end.get() : -1;
  shared.armed.store(Armed::kNo, std::memory_order_relaxed);
  shared.unread_events.store(0, std::memory_order_relaxed);
  shared.overrun.store(0, std::memory_order_relaxed);

  MutexLock lock(context.objects_mutex);
  if (channel != nullptr) ++channel->refcnt;
  cq->listed = listed.begin();
  context.cqs.splice(context.cqs.end(), listed);
  return cq.release();
}

int destroy_cq(Cq& cq) {
  if (cq.users.load(std::memory_order_acquire) != 0) return EBUSY;
  Context& context = context_of(cq.context);
  {
    MutexLock lock(context.objects_mutex);
    context.cqs.erase(cq.listed);
    if (cq.channel != nullptr) --cq.channel->refcnt;
  }
  pthread_mutex_lock(&cq.mutex);
  while (cq.comp_events_completed != cq.comp_events_delivered ||
         cq.async_events_completed != cq.async_events_delivered) {
    pthread_cond_wait(&cq.cond, &cq.mutex);
  }
  pthread_mutex_unlock(&cq.mutex);
  ++cq.shared->serial;
  {
    SharedLockGuard lock(cq.shared->lock, cq.process->me());  // write_events_of_peers may be using the channel
    cq.shared->alive.store(0, std::memory_order_release);
  }
  add_shared(cq.process->segment().counters.destroyed_cqs, cq.shared->counters);
  cq.process->arena().release(cq.shared->ring);
  cq.process->cq_table().release(cq.index);
  pthread_cond_destroy(&cq.cond);
  pthread_mutex_destroy(&cq.mutex);
  delete &cq;
  return 0;
}

namespace {

bool has_posted_sends(const Cq& cq) {
  Context& context = context_of(cq.context);
  MutexLock lock(context.objects_mutex);
  return std::any_of(context.qps.begin(), context.qps.end(), [&](const Qp* qp) {
    return qp->send_cq == &cq &&
           qp->sends.executed.load(std::memory_order_acquire) != qp->sends.posted.load(std::memory_order_acquire);
  });
}

// Requests that were posted before the call may still fill the queue; on hardware they are executed while the driver
// changes it. Waits for those that do not have to wait for a peer.
void await_posted_sends(Cq& cq) {
  const std::uint64_t end = monotonic_ns() + kMaxResizeWaitNs;
  while (has_posted_sends(cq) && monotonic_ns() < end) {
    cq.process->engine().progress();
    sched_yield();
  }
}

}  // namespace

int resize_cq(Cq& cq, int entries) {
  Process& process = *cq.process;
  if (entries < 1 || static_cast<std::uint32_t>(entries) > process.settings().max_cqe) return EINVAL;
  const std::uint32_t count = std::bit_ceil(static_cast<std::uint32_t>(entries));
  if (count <= cq.shared->mask) await_posted_sends(cq);
  Result<std::uint64_t> ring = process.arena().allocate(count * sizeof(Cqe));
  if (!ring) return ring.error().sys_errno;
  Cqe* const to = at_offset<Cqe>(process.segment(), *ring);
  SharedCq& shared = *cq.shared;
  FutexLock poll_lock(cq.poll_mutex);
  SharedLockGuard lock(shared.lock, process.me());
  const std::uint32_t tail = shared.tail.load(std::memory_order_relaxed);
  const std::uint32_t head = shared.head.load(std::memory_order_relaxed);
  if (tail - head > count) {
    process.arena().release(*ring);
    return EINVAL;
  }
  for (std::uint32_t at = head; at != tail; ++at) to[at & (count - 1)] = cq.ring[at & shared.mask];
  process.arena().release(shared.ring);
  shared.ring = *ring;
  shared.mask = count - 1;
  cq.ring = to;
  cq.cqe = static_cast<int>(count);
  return 0;
}

void count_empty_poll(Cq& cq) {
  cq.shared->counters.empty_polls.add(1);
  const std::uint32_t empty = cq.empty_polls.load(std::memory_order_relaxed) + 1;
  cq.empty_polls.store(empty, std::memory_order_relaxed);
  if (empty % kEmptyPollsPerYield == 0) sched_yield();
}

int poll_cq(ibv_cq* handle, int count, ibv_wc* completions) {
  Cq& cq = *static_cast<Cq*>(handle);
  SharedCq& shared = *cq.shared;
  cq.process->engine().progress();
  if (const int refused = begin_data_call(kPollCqCall, context_of(cq.context).device); refused != 0) return -refused;
  if (note_empty_poll(cq)) return 0;
  FutexLock lock(cq.poll_mutex);
  const std::uint32_t tail = shared.tail.load(std::memory_order_seq_cst);
  std::uint32_t head = shared.head.load(std::memory_order_relaxed);
  int found = 0;
  while (found < count && head != tail) {
    const Cqe entry = take_entry(cq, head++);
    read_entry(entry, completions[found++]);
    if (Qp* qp = cq.process->qp_at(entry.qp_index); qp != nullptr) qp->release_entry(entry);
  }
  (found != 0 ? shared.counters.polls : shared.counters.empty_polls).add(1);
  shared.counters.completions.add(static_cast<std::uint64_t>(found));
  return found;
}

int req_notify_cq(ibv_cq* handle, int solicited_only) {
  if (const int error = begin_call(Verb::kReqNotifyCq, handle->context); error != 0) return error;
  Cq& cq = *static_cast<Cq*>(handle);
  // A request for solicited completions does not cancel an earlier one for any completion.
  Armed armed = solicited_only != 0 ? Armed::kSolicited : Armed::kAny;
  if (armed == Armed::kSolicited && cq.shared->armed.load(std::memory_order_relaxed) == Armed::kAny)
    armed = Armed::kAny;
  cq.shared->armed.store(armed, std::memory_order_seq_cst);
  return 0;
}

void purge_completions(Cq& cq, std::uint32_t qp_index) {
  SharedCq& shared = *cq.shared;
  FutexLock poll_lock(cq.poll_mutex);
  SharedLockGuard lock(shared.lock, cq.process->me());
  const std::uint32_t tail = shared.tail.load(std::memory_order_relaxed);
  const std::uint32_t head = shared.head.load(std::memory_order_relaxed);
  Qp* const qp = cq.process->qp_at(qp_index);
  for (std::uint32_t at = head; at != tail; ++at) {
    const Cqe& entry = cq.ring[at & shared.mask];
    if (entry.qp_index == qp_index && qp != nullptr) qp->release_entry(entry);
  }
  std::uint32_t to = tail;  // the others move towards the tail
  for (std::uint32_t at = tail; at != head;) {
    const Cqe& entry = cq.ring[--at & shared.mask];
    if (entry.qp_index != qp_index) cq.ring[--to & shared.mask] = entry;
  }
  shared.head.store(to, std::memory_order_release);
}

}  // namespace verbatim::softverbs
