// A reliable connection: the object behind the program's handle, its send queue, and the verbs that act on it.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/engine/context.h"
#include "softverbs/engine/copies_in_flight.h"
#include "softverbs/engine/cq.h"
#include "softverbs/engine/deferred_payloads.h"
#include "softverbs/engine/engine.h"
#include "softverbs/engine/extensible.h"
#include "softverbs/engine/objects.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/receive_poster.h"
#include "softverbs/engine/requester_state.h"
#include "softverbs/engine/send_queue.h"
#include "softverbs/engine/srq.h"
#include "softverbs/engine/work_batch.h"
#include "softverbs/faults/faults.h"

namespace verbatim::softverbs {

// create_qp allocates it and destroy_qp frees it. Any thread may call its verbs; the engine executes its send queue.
struct Datagrams;

struct Qp : Extensible<ibv_qp, ibv_qp_ex> {
  Process* process = nullptr;
  std::uint32_t index = 0;
  std::list<Qp*>::iterator listed;  // its entry of Context::qps
  std::uint32_t ordinal = 0;        // number of the QP in its process in the order of creation, from 1
  SharedQp* shared = nullptr;
  ibv_qp_cap cap{};
  bool signal_all = false;
  bool was_reset = false;  // by ibv_modify_qp

  SendQueue sends;
  std::uint64_t send_ops = 0;  // IBV_QP_EX_WITH_*: the ibv_wr_* calls that the QP was created for
  WorkBatch batch;
  std::unique_ptr<Datagrams> datagrams;  // of a UD QP
  ReceivePoster receives;
  ScheduleEntry schedule{*this};  // belongs to the engine

  SharedLock execution;  // held while the send queue is executed or the state changes; taken before shared->lock
  Requester requester;
  DeferredPayloads deferred;
  std::unique_ptr<CopiesInFlight> copies;  // made at the first WRITE that may be begun ahead; see may_begin_ahead()

  Mutex modify_mutex;                                          // serializes modify and query
  ibv_qp_attr attributes VERBATIM_GUARDED_BY(modify_mutex){};  // the values set so far
  std::uint32_t events_delivered = 0;                          // under ibv_qp::mutex

  ~Qp();

  ibv_qp_state current_state() const {
    return static_cast<ibv_qp_state>(shared->state.load(std::memory_order_acquire));
  }

  // Frees the queue entries whose completion the program has read. The caller holds the CQ's poll_mutex.
  void release_entry(const Cqe& entry) {
    if ((entry.opcode & IBV_WC_RECV) == 0) {
      sends.released.store(entry.position + 1, std::memory_order_release);
    } else if (srq != nullptr) {
      static_cast<Srq*>(srq)->poster.released.fetch_add(1, std::memory_order_release);
    } else {
      receives.released.store(entry.position + 1, std::memory_order_release);
    }
  }
};

inline QpIdentity identity(const Qp& qp) {
  return {qp.ordinal, qp.qp_num, qp.shared->device};
}

// Whether a path of a QP or an address handle may begin at this port.
bool is_path_valid(const SharedPort& port, const ibv_ah_attr& path);

// They implement the verbs of these names.
Result<Qp*> create_qp(Context& context, ibv_pd* pd, ibv_qp_init_attr& wanted);
int destroy_qp(Qp& qp);
int modify_qp(Qp& qp, const ibv_qp_attr& attributes, int mask);
int query_qp(Qp& qp, ibv_qp_attr& attributes, ibv_qp_init_attr& init);
int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** bad);
int post_recv(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr** bad);

}  // namespace verbatim::softverbs
