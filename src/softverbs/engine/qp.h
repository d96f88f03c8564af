// A reliable connection: the object that the program holds, its send queue, and the steps of its life.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/mutex.h"
#include "base/result.h"
#include "softverbs/api/extended_qp.h"
#include "softverbs/engine/deferred_payloads.h"
#include "softverbs/engine/engine.h"
#include "softverbs/engine/objects.h"
#include "softverbs/engine/process.h"
#include "softverbs/faults/faults.h"

namespace verbatim::softverbs {

// Of SendRequest::flags, beside ibv_send_flags: its success is not told.
constexpr std::uint8_t kSuppressSuccess = 0x80;

// A posted work request. Its SGEs or inline bytes lie beside, at the same index.
struct SendRequest {
  std::uint64_t wr_id;
  std::uint64_t remote_address;
  std::uint64_t length;
  std::uint64_t compare_add;
  std::uint64_t swap;
  std::uint64_t arrival;  // the number of the request in its process, where that decides
  std::uint32_t rkey;
  std::uint32_t imm;
  std::uint32_t sge_count;
  std::uint8_t opcode;  // ibv_wr_opcode
  std::uint8_t flags;   // ibv_send_flags
};

// Posting threads write at `posted` under `mutex`; the engine sends and then completes, under Qp::execution; an entry
// is free again when a completion at or behind it was read.
struct SendQueue {
  std::unique_ptr<SendRequest[]> requests;
  std::unique_ptr<ibv_sge[]> sges;
  std::unique_ptr<std::uint8_t[]> inline_bytes;
  std::uint32_t mask = 0;
  FutexMutex mutex;
  std::atomic<std::uint32_t> posted{0};
  std::atomic<std::uint32_t> sent{0};      // Requester::sent, for the engine's choice under a rate
  std::atomic<std::uint32_t> executed{0};  // to be completed next
  std::atomic<std::uint32_t> released{0};
};

// Where the requests go. Dropped at reset, at an error, and when the peer is found gone.
struct Route {
  std::shared_ptr<ProcessView> process;
  SharedQp* qp = nullptr;
  std::uint32_t index = 0;
  std::uint64_t fast_path_bytes = 0;  // up to so many of a WRITE may take the quick way: see post_send.cc
};

// The half of a QP that asks; under Qp::execution.
struct Requester {
  Route route;
  std::uint32_t sent = 0;        // to be sent next; ahead of SendQueue::executed while payloads of WRITEs may be late
  std::uint64_t offset = 0;      // bytes done of the request at `sent`
  std::uint32_t psn = 0;         // of the first packet of that request
  std::uint64_t bytes_sent = 0;  // since RESET, acknowledged
  std::uint64_t step_bytes = 0;  // the most of one step
  std::uint64_t unacknowledged_bytes = 0;  // of a step that got no answer: it is repeated as it was
  std::uint32_t peer_slot = 0;             // where the last of them went
  std::uint32_t peer_device = 0;
  std::int32_t peer_pid = 0;
  std::uint32_t deferred_psn = 0;  // what the peer expects once it has taken all that is late
  std::uint32_t retries_left = 0;
  std::uint32_t rnr_retries_left = 0;
  std::uint64_t due_ns = 0;       // nothing is sent before
  bool awaiting_timeout = false;  // an attempt got no answer
  std::uint64_t busy_since_ns = 0;
  bool drain_event_pending = false;  // an SQ_DRAINED event is owed
  std::unique_ptr<QpFaults> faults;  // made when faults are first asked about
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
  std::uint32_t ordinal = 0;  // this process has created so many QPs up to this one
  SharedQp* shared = nullptr;
  ibv_qp_cap cap{};
  bool signal_all = false;

  SendQueue sends;
  std::uint64_t send_ops = 0;  // ibv_wr_* calls that it was made for, IBV_QP_EX_WITH_*
  WorkBatch batch;
  ReceivePoster receives;
  ScheduleEntry schedule;  // the engine's

  SharedLock execution;  // whoever runs the send queue or changes the state; taken before shared->lock
  Requester requester;
  DeferredPayloads deferred;

  Mutex modify_mutex;                                          // one modify or query at a time
  ibv_qp_attr attributes VERBATIM_GUARDED_BY(modify_mutex){};  // as set so far
  std::uint32_t events_delivered = 0;                          // under ibv_qp::mutex

  ibv_qp_state current_state() const {
    return static_cast<ibv_qp_state>(shared->state.load(std::memory_order_acquire));
  }

  // The program has read this completion: what it stood for may be posted again. Called under the CQ's poll_mutex.
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

// What the verbs of these names do.
Result<Qp*> create_qp(Context& context, ibv_pd* pd, ibv_qp_init_attr& wanted);
Result<Qp*> create_extended_qp(Context& context, ibv_qp_init_attr_ex& wanted);
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
