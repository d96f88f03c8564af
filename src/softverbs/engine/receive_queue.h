// Receive requests: the ring of a QP or of a shared receive queue. The owner posts; the delivering process consumes.
#pragma once

#include <infiniband/verbs.h>

#include "base/result.h"
#include "softverbs/engine/context.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/receive_poster.h"
#include "softverbs/engine/srq.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

struct Qp;

// Creates an empty ring for `max_wr` entries, which may be 0.
Status make_receive_ring(Process& process, std::uint32_t max_wr, std::uint32_t max_sge, ReceiveRing& ring,
                         ReceivePoster& poster);
void free_receive_ring(Process& process, ReceivePoster& poster);

// Appends one request. 0, EINVAL (too many SGEs) or ENOMEM (full; an entry is free when the program has read its
// completion). `qp`: the owner of the ring, nullptr for a shared receive queue.
int post_receive(ReceivePoster& poster, const ibv_recv_wr& request, const Qp* qp) VERBATIM_REQUIRES(poster.mutex);

// Copies the oldest posted entry out of the ring. False: the ring is empty. The caller serializes the consumers.
bool consume_receive(Segment& segment, ReceiveRing& ring, OpenReceive& receive);

inline std::uint32_t waiting_receives(const ReceiveRing& ring) {
  return ring.posted.load(std::memory_order_acquire) - ring.consumed.load(std::memory_order_relaxed);
}

// They implement the verbs of these names.
Result<Srq*> create_srq(Context& context, ibv_pd* pd, const ibv_srq_init_attr& attributes);
int destroy_srq(Srq& srq);
int modify_srq(Srq& srq, const ibv_srq_attr& attributes, int mask);
int query_srq(Srq& srq, ibv_srq_attr& attributes);
int post_srq_recv(ibv_srq* srq, ibv_recv_wr* request, ibv_recv_wr** bad);

}  // namespace verbatim::softverbs
