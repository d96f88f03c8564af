// A communicator with the stream and the buffers to run operations on it and to check every element of their results.
// Nothing is freed in a destructor: after an error CUDA may wait for ever for a kernel that waits for the network, and
// the process is about to end anyway.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>

#include "operations.h"

namespace verbatim::gpu {

struct CheckResult {
  std::uint64_t checked = 0;
  std::uint64_t wrong = 0;

  CheckResult& operator+=(const CheckResult& other) {
    checked += other.checked;
    wrong += other.wrong;
    return *this;
  }
};

enum class Memory {
  kCuda,        // cudaMalloc
  kRegistered,  // ncclMemAlloc and ncclCommRegister
};

struct BufferPlan {
  std::size_t bytes = 0;    // of each of the two buffers
  unsigned series = 0;      // contents of different series differ; equal on all ranks
  unsigned ranks_here = 1;  // ranks that share this machine's cores
  bool mutate = false;      // flip one bit of every result before it is compared: the comparison must find each
  Memory memory = Memory::kCuda;
};

class Exchange {
 public:
  // Takes over `comm`.
  Exchange(ncclComm_t comm, const BufferPlan& plan);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // One checked call. `count` is that of the buffers, see Call.
  CheckResult run(const Operation& operation, std::size_t count);

  // Its four steps. Between prepare and verify the operation may be enqueued several times.
  void prepare(std::size_t count);
  void enqueue(const Operation& operation, std::size_t count);
  void wait();
  CheckResult verify(const Operation& operation, std::size_t count);

  // Whether what was enqueued has been done, well or not; and what NCCL says of the network.
  bool finished() const;
  ncclResult_t network_state() const;

  // Each ends this object; `abort` returns the seconds that ncclCommAbort took.
  void close();
  double abort();

  ncclComm_t comm() const { return comm_; }
  RankPosition position() const { return position_; }

 private:
  void free_buffers();

  ncclComm_t comm_;
  RankPosition position_{};
  const BufferPlan plan_;
  unsigned iteration_;
  cudaStream_t stream_ = nullptr;
  Element* send_ = nullptr;
  Element* receive_ = nullptr;
  Element* host_ = nullptr;  // pinned
  void* send_registration_ = nullptr;
  void* receive_registration_ = nullptr;
};

// The largest count that `operation` can run with in a buffer of `bytes`; 0 when there are fewer elements than ranks.
std::size_t usable_count(const Operation& operation, std::size_t bytes, int ranks);

}  // namespace verbatim::gpu
