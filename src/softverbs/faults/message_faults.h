// What Faults knows and decides about one message of a QP, and what it needs to know of the QP.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <vector>

namespace verbatim::softverbs {

// A bit of a send request's flags beside ibv_send_flags: the request does not complete when it succeeds.
constexpr std::uint8_t kSuppressSuccess = 0x80;

// The faults that apply to one message.
struct MessageFaults {
  std::uint64_t requests_to_lose = 0;
  std::uint64_t acks_to_lose = 0;
  std::uint64_t refusals = 0;  // number of RNR NAKs
  double request_loss_rate = 0;
  double ack_loss_rate = 0;
  std::uint64_t arrival_ns = 0;  // when the first packet arrives
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint32_t vendor_error = 0;
  bool drops_completion = false;
};

// Of one QP, guarded by Qp::execution.
struct QpFaults {
  bool is_evaluated = false;  // `message` applies to the request at `position` of the send queue
  std::uint32_t position = 0;
  MessageFaults message;
  std::uint64_t random_count = 0;   // random numbers drawn so far
  std::vector<std::uint64_t> seen;  // number of matching messages, by clause
  std::uint64_t generation = 0;     // of the clauses that `seen` counts for
};

// How clauses select a QP.
struct QpIdentity {
  std::uint32_t ordinal;  // number in the order of creation, from 1
  std::uint32_t qpn;
  std::uint32_t device;
};

// The send request that a QP sends now. Valid while the caller holds Qp::execution.
struct CurrentRequest {
  QpIdentity qp;
  QpFaults& faults;        // of the QP
  std::uint32_t position;  // in the send queue
  std::uint8_t opcode;     // ibv_wr_opcode
  std::uint8_t& flags;     // gets kSuppressSuccess when the completion is dropped
  bool is_last_posted;
  std::uint64_t timeout_ns;  // until the requester repeats it, 0: never
};

}  // namespace verbatim::softverbs
