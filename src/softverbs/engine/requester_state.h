// The state of the requester half of a QP.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>

#include "softverbs/faults/message_faults.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

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
  QpFaults faults;
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

}  // namespace verbatim::softverbs
