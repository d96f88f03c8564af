// What isend, irecv and iflush hand to NCCL and test takes back. Requests live in arrays of their comm and are found by
// index; the state is all that test must read of one that has finished.
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbatim {

class Comm;

enum class RequestKind : std::uint8_t { kSend, kRecv, kFlush };
enum class RequestState : std::uint8_t { kFree, kPending, kDone };

struct Request {
  Comm* comm = nullptr;
  RequestKind kind = RequestKind::kSend;
  RequestState state = RequestState::kFree;
};

}  // namespace verbatim
