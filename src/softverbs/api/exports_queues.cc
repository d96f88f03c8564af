// The C API: completion queues and channels, shared receive queues, queue pairs.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/clock.h"
#include "softverbs/api/exports.h"
#include "softverbs/engine/call.h"
#include "softverbs/engine/completion_queue.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/receive_queue.h"

namespace verbatim::softverbs {

Result<EventPipe> make_event_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return verbatim::system_error("pipe2", errno);
  EventPipe pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
  // Writing never blocks. The program chooses whether reading does.
  ::fcntl(ends[1], F_SETFL, O_NONBLOCK);
  return pipe;
}

bool await_event(int fd, Process& process) {
  Engine& engine = process.engine();
  for (;;) {
    const bool blocks = (::fcntl(fd, F_GETFL) & O_NONBLOCK) == 0;
    if (blocks && !engine.is_threaded()) {
      // A peer that moves a QP to the error state creates work without a timer or a wake-up: look for it every
      // millisecond.
      engine.progress();
      const std::uint64_t wait_ms = std::min<std::uint64_t>(engine.idle_ns() / kNanosecondsPerMillisecond, 1);
      pollfd readable{fd, POLLIN, 0};
      const int ready = ::poll(&readable, 1, static_cast<int>(wait_ms));
      if (ready < 0) return false;
      if (ready == 0) continue;
    }
    char byte = 0;
    const ssize_t count = ::read(fd, &byte, 1);
    if (count == 1) return true;
    if (count == 0) errno = EBADF;
    return false;
  }
}

namespace {

Result<Channel*> create_channel(ibv_context* context) {
  Result<EventPipe> pipe = make_event_pipe();
  if (!pipe) return pipe.error();
  auto channel = std::make_unique<Channel>();
  channel->context = context;
  channel->pipe = *std::move(pipe);
  channel->fd = channel->pipe.read_end.get();
  channel->refcnt = 0;
  context_of(context).process->objects(ObjectKind::kChannel).count_created();
  return channel.release();
}

// Removes an unread event of one of the channel's CQs, of the oldest CQ first. nullptr: there is none.
Cq* pop_cq_event(Context& context, const ibv_comp_channel* channel) {
  MutexLock lock(context.objects_mutex);
  for (Cq* cq : context.cqs) {
    if (cq->channel != channel || cq->shared->unread_events.load(std::memory_order_acquire) == 0) continue;
    cq->shared->unread_events.fetch_sub(1, std::memory_order_acq_rel);
    pthread_mutex_lock(&cq->mutex);
    ++cq->comp_events_delivered;
    pthread_mutex_unlock(&cq->mutex);
    return cq;
  }
  return nullptr;
}

}  // namespace
}  // namespace verbatim::softverbs

using namespace verbatim::softverbs;

extern "C" {

SOFTVERBS_EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  if (begin_call(Verb::kCreateCompChannel, context) != 0) return nullptr;
  return call_and_return_pointer([&] { return create_channel(context); });
}

SOFTVERBS_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  if (const int error = begin_call(Verb::kDestroyCompChannel, channel->context); error != 0) return error;
  Context& context = context_of(channel->context);
  {
    verbatim::MutexLock lock(context.objects_mutex);
    if (channel->refcnt != 0) return EBUSY;
  }
  context.process->objects(ObjectKind::kChannel).count_destroyed();
  delete static_cast<Channel*>(channel);
  return 0;
}

SOFTVERBS_EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                                       int comp_vector) {
  if (begin_call(Verb::kCreateCq, context) != 0) return nullptr;
  if (comp_vector < 0 || comp_vector >= context->num_comp_vectors ||
      (channel != nullptr && channel->context != context)) {
    errno = EINVAL;
    return nullptr;
  }
  return call_and_return_pointer([&] { return create_cq(context_of(context), entries, cq_context, channel); });
}

SOFTVERBS_EXPORT int ibv_destroy_cq(ibv_cq* cq) {
  if (const int error = begin_call(Verb::kDestroyCq, cq->context); error != 0) return error;
  return with_errno(destroy_cq(*static_cast<Cq*>(cq)));
}

SOFTVERBS_EXPORT int ibv_resize_cq(ibv_cq* cq, int entries) {
  if (const int error = begin_call(Verb::kResizeCq, cq->context); error != 0) return error;
  return with_errno(resize_cq(*static_cast<Cq*>(cq), entries));
}

SOFTVERBS_EXPORT int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) {
  if (begin_call(Verb::kGetCqEvent, channel->context) != 0) return -1;
  Context& context = context_of(channel->context);
  for (;;) {
    if (!await_event(channel->fd, *context.process)) return -1;
    // The byte may belong to a CQ that was destroyed. Then wait for the next one.
    if (Cq* ready = pop_cq_event(context, channel); ready != nullptr) {
      *cq = ready;
      *cq_context = ready->cq_context;
      return 0;
    }
  }
}

SOFTVERBS_EXPORT void ibv_ack_cq_events(ibv_cq* cq, unsigned events) {
  count(Verb::kAckCqEvents);
  pthread_mutex_lock(&cq->mutex);
  cq->comp_events_completed += events;
  pthread_cond_broadcast(&cq->cond);
  pthread_mutex_unlock(&cq->mutex);
}

SOFTVERBS_EXPORT ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* attributes) {
  if (begin_call(Verb::kCreateSrq, pd->context) != 0) return nullptr;
  return call_and_return_pointer([&] { return create_srq(context_of(pd->context), pd, *attributes); });
}

SOFTVERBS_EXPORT int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* attributes, int mask) {
  if (const int error = begin_call(Verb::kModifySrq, srq->context); error != 0) return error;
  return with_errno(modify_srq(*static_cast<Srq*>(srq), *attributes, mask));
}

SOFTVERBS_EXPORT int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* attributes) {
  if (const int error = begin_call(Verb::kQuerySrq, srq->context); error != 0) return error;
  return with_errno(query_srq(*static_cast<Srq*>(srq), *attributes));
}

SOFTVERBS_EXPORT int ibv_destroy_srq(ibv_srq* srq) {
  if (const int error = begin_call(Verb::kDestroySrq, srq->context); error != 0) return error;
  return with_errno(destroy_srq(*static_cast<Srq*>(srq)));
}

SOFTVERBS_EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  if (begin_call(Verb::kCreateQp, pd->context) != 0) return nullptr;
  return call_and_return_pointer([&] { return create_qp(context_of(pd->context), pd, *attributes); });
}

SOFTVERBS_EXPORT int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  if (const int error = begin_call(Verb::kModifyQp, qp->context); error != 0) return error;
  return with_errno(modify_qp(*static_cast<Qp*>(qp), *attributes, mask));
}

SOFTVERBS_EXPORT int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attributes, int, ibv_qp_init_attr* init) {
  if (const int error = begin_call(Verb::kQueryQp, qp->context); error != 0) return error;
  return with_errno(query_qp(*static_cast<Qp*>(qp), *attributes, *init));
}

SOFTVERBS_EXPORT int ibv_destroy_qp(ibv_qp* qp) {
  if (const int error = begin_call(Verb::kDestroyQp, qp->context); error != 0) return error;
  return with_errno(destroy_qp(*static_cast<Qp*>(qp)));
}

// Never in order: a program that relies on the order of a WRITE's bytes fails on most devices.
SOFTVERBS_EXPORT int ibv_query_qp_data_in_order(ibv_qp*, ibv_wr_opcode, std::uint32_t) {
  count(Verb::kQueryQpDataInOrder);
  return 0;
}

SOFTVERBS_EXPORT int ibv_query_ece(ibv_qp*, ibv_ece*) {
  count(Verb::kQueryEce);
  return EOPNOTSUPP;
}

SOFTVERBS_EXPORT int ibv_set_ece(ibv_qp*, ibv_ece*) {
  count(Verb::kSetEce);
  return EOPNOTSUPP;
}

SOFTVERBS_EXPORT int ibv_attach_mcast(ibv_qp*, const ibv_gid*, std::uint16_t) {
  count(Verb::kAttachMcast);
  return EOPNOTSUPP;
}

SOFTVERBS_EXPORT int ibv_detach_mcast(ibv_qp*, const ibv_gid*, std::uint16_t) {
  return EOPNOTSUPP;
}

}  // extern "C"
