// A reliable connection: the object behind the program's handle, its send queue, and the verbs that act on it.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/engine/deferred_payloads.h"
#include "softverbs/engine/engine.h"
#include "softverbs/engine/objects.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/work_batch.h"
#include "softverbs/faults/faults.h"

namespace verbatim::softverbs {

// A posted work request. Its SGEs or inline bytes are in SendQueue at the same index.
struct SendRequest {
  std::uint64_t wr_id;
  std::uint64_t remote_address;
  std::uint64_t length;
  std::uint64_t compare_add;
  std::uint64_t swap;
  std::uint64_t arrival;  // the number of the request in the order of posting in its process
  std::uint32_t rkey;
  std::uint32_t imm;
  std::uint32_t sge_count;
  std::uint8_t opcode;  // ibv_wr_opcode
  std::uint8_t flags;   // ibv_send_flags and kSuppressSuccess
};

// Posting threads write entries at `posted` under `mutex`. The engine sends and completes them under Qp::execution. An
// entry is free when the program has read the completion of that request or of a later one.
struct SendQueue {
  std::unique_ptr<SendRequest[]> requests;
  std::unique_ptr<ibv_sge[]> sges;
  std::unique_ptr<std::uint8_t[]> inline_bytes;
  std::uint32_t mask = 0;
  FutexMutex mutex;
  std::atomic<std::uint32_t> posted{0};
  std::atomic<std::uint32_t> sent{0};      // copy of Requester::sent, which the engine reads without Qp::execution
  std::atomic<std::uint32_t> executed{0};  // position of the next request to complete
  std::atomic<std::uint32_t> released{0};
};

// Where the requests go. Cleared at a reset, at an error, and when the peer process is dead.
struct Route {
  std::shared_ptr<ProcessView> process;
  SharedQp* qp = nullptr;
  std::uint32_t index = 0;
  std::uint64_t fast_path_bytes = 0;  // longest WRITE that may take the fast path of post_send.cc; 0: none
};

// The requester half of a QP. Guarded by Qp::execution.
struct Requester {
  Route route;
  std::uint32_t sent = 0;    // position of the next request to send; ahead of `executed` while payloads are deferred
  std::uint64_t offset = 0;  // sent bytes of the request at `sent`
  std::uint32_t psn = 0;     // of the first packet of that request
  std::uint64_t bytes_sent = 0;            // since RESET, acknowledged
  std::uint64_t step_bytes = 0;            // the most bytes of one step
  std::uint64_t unacknowledged_bytes = 0;  // size of a step that got no response: its repetition has the same size
  std::uint32_t peer_slot = 0;             // the peer of the last route
  std::uint32_t peer_device = 0;
  std::int32_t peer_pid = 0;
  std::uint32_t deferred_psn = 0;  // the PSN that the peer expects after all deferred WRITEs
  std::uint32_t retries_left = 0;
  std::uint32_t rnr_retries_left = 0;
  std::uint64_t due_ns = 0;       // nothing is sent before this time
  bool awaiting_timeout = false;  // an attempt got no response
  std::uint64_t busy_since_ns = 0;
  bool drain_event_pending = false;  // SQ_DRAINED must be raised when the queue is drained
  std::unique_ptr<QpFaults> faults;  // created when a fault is first evaluated
  // Attributes
  std::uint32_t timeout = 0;
  std::uint32_t retry_count = 0;
  std::uint32_t rnr_retry_count = 0;
  std::uint32_t mtu_bytes = 0;
  std::uint32_t dest_qpn = 0;
  std::uint32_t max_rd_atomic = 0;
  ibv_ah_attr path{};

  std::uint64_t timeout_ns() const { return std::uint64_t{4096} << timeout; }
};

struct Qp : Extensible<ibv_qp, ibv_qp_ex> {
  Process* process = nullptr;
  std::uint32_t index = 0;
  std::uint32_t ordinal = 0;  // number of the QP in its process in the order of creation, from 1
  SharedQp* shared = nullptr;
  ibv_qp_cap cap{};
  bool signal_all = false;

  SendQueue sends;
  std::uint64_t send_ops = 0;  // IBV_QP_EX_WITH_*: the ibv_wr_* calls that the QP was created for
  WorkBatch batch;
  ReceivePoster receives;
  ScheduleEntry schedule;  // belongs to the engine

  SharedLock execution;  // held while the send queue is executed or the state changes; taken before shared->lock
  Requester requester;
  DeferredPayloads deferred;

  Mutex modify_mutex;                                          // serializes modify and query
  ibv_qp_attr attributes VERBATIM_GUARDED_BY(modify_mutex){};  // the values set so far
  std::uint32_t events_delivered = 0;                          // under ibv_qp::mutex

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

// They implement the verbs of these names.
Result<Qp*> create_qp(Context& context, ibv_pd* pd, ibv_qp_init_attr& wanted);
int destroy_qp(Qp& qp);
int modify_qp(Qp& qp, const ibv_qp_attr& attributes, int mask);
int query_qp(Qp& qp, ibv_qp_attr& attributes, ibv_qp_init_attr& init);
int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** bad);
int post_recv(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr** bad);

inline void count_request(SendCounters& counters, std::uint8_t opcode, std::uint64_t length, unsigned flags) {
  counters.requests[opcode].add(1);
  counters.bytes.add(length);
  if ((flags & IBV_SEND_INLINE) != 0) counters.inline_bytes.add(length);
}

}  // namespace verbatim::softverbs
