// A communicator with a stream and buffers: runs operations and checks every element of their results. Used by the
// rank's main thread. No destructor frees anything: after an error CUDA may wait without end for a kernel that waits
// for the network, and the process ends anyway.
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
  kWindows,     // ncclMemAlloc and ncclCommWindowRegister, symmetric: what puts need
};

struct BufferPlan {
  std::size_t bytes = 0;       // of each of the two buffers
  unsigned series = 0;         // equal on all ranks; different series have different contents
  unsigned ranks_on_host = 1;  // ranks that share this host's cores
  bool mutate = false;         // flip one bit of every result before the comparison, which must find each
  Memory memory = Memory::kCuda;
};

class Exchange {
 public:
  // Owns `comm` from here on: close() or abort() ends it.
  Exchange(ncclComm_t comm, const BufferPlan& plan);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Runs and checks one call. `count` is the number of elements of each buffer, see Call.
  CheckResult run(const Operation& operation, std::size_t count);

  // The four steps of run(). Between prepare and verify the operation may be enqueued several times.
  void prepare(std::size_t count);
  void enqueue(const Operation& operation, std::size_t count);
  void wait();
  CheckResult verify(const Operation& operation, std::size_t count);

  // Whether the enqueued operations have ended, with or without an error; and NCCL's asynchronous error.
  bool finished() const;
  ncclResult_t network_state() const;

  // Call one of the two, once, as the last call. `abort` returns the seconds that ncclCommAbort took.
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
  ncclWindow_t send_window_ = nullptr;
  ncclWindow_t receive_window_ = nullptr;
};

// The largest count that `operation` can run with in a buffer of `bytes`; 0 when there are fewer elements than ranks.
std::size_t usable_count(const Operation& operation, std::size_t bytes, int ranks);

}  // namespace verbatim::gpu
