// Completion queues. The ring lies in the owner's segment. The owner's engine and every peer that delivers a message
// write entries under the queue's shared lock; only the owner reads them.
#pragma once

#include <infiniband/verbs.h>

#include "base/clock.h"
#include "base/result.h"
#include "softverbs/engine/context.h"
#include "softverbs/engine/cq.h"
#include "softverbs/faults/faults.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

// If the queue is armed for such a completion, disarms it and wakes the program through the completion channel.
void notify(const ProcessView& process, SharedCq& cq, bool failed, bool solicited);
// Puts the queue into the overrun state, in which it accepts no entries, and raises IBV_EVENT_CQ_ERR for the owner.
void overrun(const ProcessView& process, Incarnation me, std::uint32_t cq_index);

// Appends an entry, which fill(Cqe&) writes, to a queue of any process, and notifies if the queue is armed. A reader of
// the entry sees everything written before. False: the queue is full, which is an overrun.
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
  Cqe& entry = at_offset<Cqe>(segment, cq.ring)[tail & cq.mask];
  fill(entry);
  if (cq.is_stamped != 0) entry.timestamp_ns = monotonic_ns();
  QpCounters& counters = segment.qps[entry.qp_index].counters;
  ((entry.opcode & IBV_WC_RECV) != 0 ? counters.receive_completions : counters.send_completions).add(1);
  // Sequentially consistent, like the store of `armed` in req_notify_cq: either we see that the queue is armed, or the
  // program's next poll sees this entry.
  cq.tail.store(tail + 1, std::memory_order_seq_cst);
  if (cq.armed.load(std::memory_order_seq_cst) != Armed::kNo) notify(process, cq, failed, solicited);
  return true;
}

inline bool push_completion(const ProcessView& process, Incarnation me, std::uint32_t cq_index, const Cqe& entry,
                            bool solicited) {
  return push_filled(process, me, cq_index, entry.status != IBV_WC_SUCCESS, solicited,
                     [&](Cqe& slot) { slot = entry; });
}

// Called by the owner. They implement the verbs of these names and return what those return.
Result<Cq*> create_cq(Context& context, int entries, void* cq_context, ibv_comp_channel* channel);
int destroy_cq(Cq& cq);
int resize_cq(Cq& cq, int entries);
int poll_cq(ibv_cq* cq, int count, ibv_wc* completions);
int req_notify_cq(ibv_cq* cq, int solicited_only);

// Removes the entry at the head. The caller holds poll_mutex, and frees the entry of the send or receive queue only
// then: a request that is posted in its place must find room, where the CQ is as large as its queues.
inline Cqe take_entry(Cq& cq, std::uint32_t head) {
  const Cqe entry = cq.ring[head & cq.shared->mask];
  cq.shared->head.store(head + 1, std::memory_order_release);
  return entry;
}

// Translates an entry into the completion that the program reads.
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
  completion.slid = entry.slid;
  completion.sl = entry.sl;
  completion.dlid_path_bits = entry.dlid_path_bits;
  if (entry.status != IBV_WC_SUCCESS) {
    completion.vendor_err = entry.imm;
    if (Faults* all = faults(); all != nullptr) all->randomize_undefined(completion);
  }
}
void count_empty_poll(Cq& cq);
// Counts the poll and returns true when the queue is empty.
inline bool note_empty_poll(Cq& cq) {
  if (cq.shared->tail.load(std::memory_order_seq_cst) == cq.shared->head.load(std::memory_order_relaxed)) {
    count_empty_poll(cq);
    return true;
  }
  cq.empty_polls.store(0, std::memory_order_relaxed);
  return false;
}

// Invalidates the entries of a QP that is reset or destroyed, and frees the queue entries of their requests.
void purge_completions(Cq& cq, std::uint32_t qp_index);

}  // namespace verbatim::softverbs
