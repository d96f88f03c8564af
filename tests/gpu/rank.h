// One rank of nccl_run: a process of its own, started by fork and exec before anything touches CUDA.
#pragma once

#include <cstddef>
#include <vector>

namespace verbatim::gpu {

struct Plan {
  int ranks = 2;
  std::vector<std::size_t> operations;  // indices into kOperations, in the order to run
  std::vector<std::size_t> scenarios;   // indices into kScenarios, after them
  std::size_t first_bytes = 8;
  std::size_t last_bytes = std::size_t{256} << 20U;
  std::size_t factor = 2;
  unsigned iterations = 10;
  bool registered = false;   // buffers of ncclMemAlloc, registered with ncclCommRegister
  bool mutate = false;       // flip one bit of every result before the comparison, which must find each
  bool replacement = false;  // this process replaces the rank that was killed in the scenario peer_killed
};

// Runs the plan as rank `rank`; `socket` connects to the parent. Returns the process's exit status.
int run_rank(const Plan& plan, int rank, int socket);

}  // namespace verbatim::gpu
