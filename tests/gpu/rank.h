// One rank of nccl_run and what it tells its parent. A rank is a process of its own, started by fork and exec before
// anything touches CUDA.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace verbatim::gpu {

struct Plan {
  int ranks = 2;
  std::vector<std::size_t> operations;  // indices into kOperations, in the order to run
  std::size_t first_bytes = 8;
  std::size_t last_bytes = std::size_t{64} << 20U;
  std::size_t factor = 2;
  unsigned iterations = 10;
  bool mutate = false;  // flip one bit of every result before it is compared: the comparison must find each
};

// One message on the SOCK_SEQPACKET socket between a rank and its parent; the parent sends kId messages only.
struct Report {
  enum class Kind : std::uint32_t { kId, kRow, kError, kDone };
  Kind kind;
  std::uint32_t operation;  // kRow: index into kOperations
  std::uint64_t count;      // kRow: elements of the buffer
  double microseconds;      // kRow: of one call, the mean of the timed ones
  std::uint64_t wrong;      // kRow: wrong elements over all checked calls
  std::uint64_t checked;    // kRow: elements compared
  ncclUniqueId id;          // kId
  char text[256];           // kError, kDone: one line
};
static_assert(std::is_trivially_copyable_v<Report>);

// Runs the plan as rank `rank`, talking to the parent over `socket`. Returns the process's exit status.
int run_rank(const Plan& plan, int rank, int socket);

}  // namespace verbatim::gpu
