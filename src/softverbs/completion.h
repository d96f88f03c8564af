// Completion queues. The ring lies in the owner's segment: its engine, and every peer that delivers a message, write
// entries under the queue's shared lock; only the owner reads them.
#pragma once

#include <infiniband/verbs.h>

#include "base/result.h"
#include "softverbs/objects.h"
#include "softverbs/process_view.h"

namespace verbatim::softverbs {

// Appends an entry to a queue of any process, and announces it if the queue is armed. Everything written before is
// visible to whoever reads the entry. False when the queue was full: it is then in error, as its owner is told.
bool push_completion(const ProcessView& process, Incarnation me, std::uint32_t cq_index, const Cqe& entry,
                     bool solicited);

// Those of the owner. They return what the verbs of these names do.
Result<Cq*> create_cq(Context& context, int entries, void* cq_context, ibv_comp_channel* channel);
int destroy_cq(Cq& cq);
int resize_cq(Cq& cq, int entries);
int poll_cq(ibv_cq* cq, int count, ibv_wc* completions);
int req_notify_cq(ibv_cq* cq, int solicited_only);

// What a program is told of an entry.
void read_entry(const Cqe& entry, ibv_wc& completion);
// True when nothing waits: the poll is over, and counted.
bool note_empty_poll(Cq& cq);

// Forgets the entries of a QP that is reset or destroyed, and frees the receive entries that they stood for.
void purge_completions(Cq& cq, std::uint32_t qp_index);

}  // namespace verbatim::softverbs
