// A request: isend, irecv and iflush return it, test frees it when it is done. Requests live in arrays of their comm
// and are found by index. Test reads only the state of one that is done.
#pragma once

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>

namespace verbatim {

class Comm;

// Selects the function that tests the request. kRecvAtomic: a receive whose arrival an atomic signals in memory.
// kTimed...: of a comm that measures latencies. kProfiled...: of one that gives events to NCCL's profiler.
enum class RequestKind : std::uint8_t {
  kSend,
  kRecv,
  kRecvAtomic,
  kFlush,
  kTimedSend,
  kTimedRecv,
  kTimedRecvAtomic,
  kProfiledSend,
  kProfiledRecv
};
// kDoneUnconfirmed: reported done to NCCL, but the sender may not have used its CTS entry yet.
enum class RequestState : std::uint8_t { kFree, kPending, kDone, kDoneUnconfirmed };

struct Request {
  // Changes of a receive that Comm::advance_for_idle may read at the same time. Release: it may act after the last one.
  void change_state(RequestState next) { std::atomic_ref(state).store(next, std::memory_order_release); }

  Comm* comm = nullptr;
  RequestKind kind = RequestKind::kSend;
  RequestState state = RequestState::kFree;
};

// NCCL_NET_OPTIONAL_RECV_COMPLETION: what `*request` may hold when irecv is called.
inline void* const kOptionalCompletion = reinterpret_cast<void*>(std::uintptr_t{1});

// A size as the ABI's test reports it; INT_MAX when it does not fit.
inline int narrow(std::uint64_t size) {
  return size > INT_MAX ? INT_MAX : static_cast<int>(size);
}

}  // namespace verbatim
