// The send queue of a QP.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "softverbs/engine/futex_mutex.h"
#include "softverbs/host/counters.h"

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

inline void count_request(SendCounters& counters, std::uint8_t opcode, std::uint64_t length, unsigned flags) {
  counters.requests[opcode].add(1);
  counters.bytes.add(length);
  if ((flags & IBV_SEND_INLINE) != 0) counters.inline_bytes.add(length);
}

}  // namespace verbatim::softverbs
