// What isend, irecv and iflush hand to NCCL and test takes back. Requests live in arrays of their comm and are found by
// index; the state is all that test must read of one that has finished.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace verbatim {

class Comm;

// kRecvAtomic: a receive whose arrival is polled in memory.
enum class RequestKind : std::uint8_t { kSend, kRecv, kRecvAtomic, kFlush };
// kSilent: taken back by NCCL, but whether its CTS entry has been used is not known yet.
enum class RequestState : std::uint8_t { kFree, kPending, kDone, kDoneUnconfirmed };

struct Request {
  Comm* comm = nullptr;
  RequestKind kind = RequestKind::kSend;
  RequestState state = RequestState::kFree;
};

// NCCL_NET_OPTIONAL_RECV_COMPLETION: what `*request` may hold when irecv is called.
inline void* const kOptionalCompletion = reinterpret_cast<void*>(std::uintptr_t{1});

// A size as the ABI's test reports it; INT_MAX for all that do not fit.
inline int narrow(std::uint64_t size) {
  return size > INT_MAX ? INT_MAX : static_cast<int>(size);
}

}  // namespace verbatim
