// Completion queues. The ring lies in the owner's segment: its engine, and every peer that delivers a message, write
// entries under the queue's shared lock; only the owner reads them.
#pragma once

#include <infiniband/verbs.h>

#include "base/clock.h"
#include "base/result.h"
#include "softverbs/engine/objects.h"
#include "softverbs/faults/faults.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

// Wakes whoever waits for a completion of this sort at the queue, if it is armed.
void notify(const ProcessView& process, SharedCq& cq, bool failed, bool solicited);
// The queue is in error from now on, as its owner is told.
void overrun(const ProcessView& process, Incarnation me, std::uint32_t cq_index);

// Appends the entry that fill(Cqe&) makes of an old one to a queue of any process, and announces it if the queue is
// armed. Everything written before is visible to whoever reads the entry. False when the queue was full.
template <typename Fill>
bool push_filled(const ProcessView& process, Incarnation me, std::uint32_t cq_index, bool failed, bool solicited,
                 Fill fill) {
  Segment& segment = process.segment();
  SharedCq& cq = segment.cqs[cq_index];
  SharedLockGuard lock(cq.lock, me);
  if (cq.overrun.load(std::memory_order_relaxed) != 0) return false;
  const std::uint32_t tail = cq.tail.load(std::memory_order_relaxed);
  if (tail - cq.head.load(std::memory_order_acquire) > cq.mask) {
    overrun(process, me, cq_index);
    return false;
  }
  Cqe& place = at_offset<Cqe>(segment, cq.ring)[tail & cq.mask];
  fill(place);
  if (cq.is_stamped != 0) place.timestamp_ns = monotonic_ns();
  QpCounters& counters = segment.qps[place.qp_index].counters;
  ((place.opcode & IBV_WC_RECV) != 0 ? counters.receive_completions : counters.send_completions).add(1);
  // With the store of `armed` in req_notify_cq and the program's next poll: one of the two sees the other.
  cq.tail.store(tail + 1, std::memory_order_seq_cst);
  if (cq.armed.load(std::memory_order_seq_cst) != Armed::kNo) notify(process, cq, failed, solicited);
  return true;
}

inline bool push_completion(const ProcessView& process, Incarnation me, std::uint32_t cq_index, const Cqe& entry,
                            bool solicited) {
  return push_filled(process, me, cq_index, entry.status != IBV_WC_SUCCESS, solicited,
                     [&](Cqe& place) { place = entry; });
}

// Those of the owner. They return what the verbs of these names do.
Result<Cq*> create_cq(Context& context, int entries, void* cq_context, ibv_comp_channel* channel);
int destroy_cq(Cq& cq);
int resize_cq(Cq& cq, int entries);
int poll_cq(ibv_cq* cq, int count, ibv_wc* completions);
int req_notify_cq(ibv_cq* cq, int solicited_only);

// What a program is told of an entry.
inline void read_entry(const Cqe& entry, ibv_wc& completion) {
  completion.wr_id = entry.wr_id;
  completion.status = static_cast<ibv_wc_status>(entry.status);
  completion.opcode = static_cast<ibv_wc_opcode>(entry.opcode);
  completion.vendor_err = 0;
  completion.byte_len = entry.byte_len;
  completion.imm_data = entry.imm;
  completion.qp_num = entry.qpn;
  completion.src_qp = entry.source_qpn;
  completion.wc_flags = entry.wc_flags;
  completion.pkey_index = 0;
  completion.slid = 0;
  completion.sl = 0;
  completion.dlid_path_bits = 0;
  if (entry.status != IBV_WC_SUCCESS) {
    completion.vendor_err = entry.imm;
    if (Faults* all = faults(); all != nullptr) all->randomize_undefined(completion);
  }
}
void count_empty_poll(Cq& cq);
// True when nothing waits: the poll is over, and counted.
inline bool note_empty_poll(Cq& cq) {
  if (cq.shared->tail.load(std::memory_order_seq_cst) == cq.shared->head.load(std::memory_order_relaxed)) {
    count_empty_poll(cq);
    return true;
  }
  cq.empty_polls.store(0, std::memory_order_relaxed);
  return false;
}

// Forgets the entries of a QP that is reset or destroyed, and frees the receive entries that they stood for.
void purge_completions(Cq& cq, std::uint32_t qp_index);

}  // namespace verbatim::softverbs
