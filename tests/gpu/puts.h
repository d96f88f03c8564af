// Operations on NCCL's host calls for one-sided transfers (NCCL 2.29 and later): no kernel runs. Included by
// operations.h, which has the types.
#pragma once

namespace verbatim::gpu {

// NCCL 2.30.7 accepts only signal 0, context 0 and flags 0.
inline ncclResult_t signal_rank(int rank, const Call& call) {
  return ncclSignal(rank, 0, 0, 0, call.comm, call.stream);
}

// Waits for one more signal of `rank`.
inline ncclResult_t wait_for_rank(int rank, const Call& call) {
  ncclWaitSignalDesc_t signal{1, rank, 0, 0};
  return ncclWaitSignal(1, &signal, call.comm, call.stream);
}

// Puts `count` elements at `offset` of the send buffer to element `at` of the receive buffer of `rank`, and signals.
inline ncclResult_t put_block(int rank, std::size_t offset, std::size_t at, std::size_t count, const Call& call) {
  return ncclPutSignal(call.send + offset, count, kElementType, rank, call.receive_window, at * sizeof(Element), 0, 0,
                       0, call.comm, call.stream);
}

// Calls `step` for each rank but the own one, beginning with the next, until one fails.
template <typename Step>
ncclResult_t for_each_peer(RankPosition position, const Step& step) {
  for (int distance = 1; distance < position.ranks; ++distance) {
    const ncclResult_t result = step((position.rank + distance) % position.ranks);
    if (result != ncclSuccess && result != ncclInProgress) return result;
  }
  return ncclSuccess;
}

// Each rank puts its buffer to the next rank. A rank may put only after the first signal of the next rank: until then
// that rank may still compare the previous result.
inline ncclResult_t put(const Call& call) {
  const int next = next_rank(call.position);
  const int previous = previous_rank(call.position);
  if (const auto result = signal_rank(previous, call); result != ncclSuccess) return result;
  if (const auto result = wait_for_rank(next, call); result != ncclSuccess) return result;
  if (const auto result = put_block(next, 0, 0, call.count, call); result != ncclSuccess) return result;
  return wait_for_rank(previous, call);
}

// Block r of each rank's send buffer is put to rank r, after the signal of rank r.
inline ncclResult_t alltoall_put(const Call& call) {
  const std::size_t block = call.count / static_cast<std::size_t>(call.position.ranks);
  const std::size_t own = block * static_cast<std::size_t>(call.position.rank);
  if (cudaMemcpyAsync(call.receive + own, call.send + own, block * sizeof(Element), cudaMemcpyDeviceToDevice,
                      call.stream) != cudaSuccess) {
    return ncclUnhandledCudaError;
  }
  const auto signalled = for_each_peer(call.position, [&](int rank) { return signal_rank(rank, call); });
  if (signalled != ncclSuccess) return signalled;
  const auto ready = for_each_peer(call.position, [&](int rank) { return wait_for_rank(rank, call); });
  if (ready != ncclSuccess) return ready;
  const auto put = for_each_peer(call.position, [&](int rank) {
    return put_block(rank, block * static_cast<std::size_t>(rank), own, block, call);
  });
  if (put != ncclSuccess) return put;
  return for_each_peer(call.position, [&](int rank) { return wait_for_rank(rank, call); });
}

}  // namespace verbatim::gpu
