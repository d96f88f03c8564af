// The operations that nccl_run can run and their expected results. A new operation is one more row in kOperations.
#pragma once

#include <nccl.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace verbatim::gpu {

// Elements are 32-bit words and sums wrap, so that every bit of a result is known for any order of additions.
using Element = std::uint32_t;
constexpr ncclDataType_t kElementType = ncclUint32;

// The element of `rank` at `index` in `iteration`: a hash of all three, so that an element at a wrong index, of a wrong
// rank or of an earlier iteration differs from the expected one.
constexpr Element pattern(int rank, unsigned iteration, std::size_t index) {
  std::uint64_t x = index + 0x9e3779b97f4a7c15U * (static_cast<std::uint64_t>(rank) + 1);
  x ^= static_cast<std::uint64_t>(iteration) << 40U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return static_cast<Element>(x >> 32U);
}

struct RankPosition {
  int rank;
  int ranks;
};

// One call of an operation: device buffers of `count` elements each, on every rank.
struct Call {
  const Element* send;
  Element* receive;
  std::size_t count;
  RankPosition position;
  ncclComm_t comm;
  cudaStream_t stream;
  ncclWindow_t receive_window;  // of the receive buffer; null except for puts
};

struct Operation {
  const char* name;
  bool collective;  // a collective of NCCL; otherwise sends and receives, for which NCCL chooses no protocol
  bool count_is_multiple_of_ranks;  // the buffer is divided into one equal block per rank
  bool result_is_one_block;         // a rank receives one such block, at the start of its receive buffer
  ncclResult_t (*enqueue)(const Call& call);
  Element (*expected)(RankPosition position, unsigned iteration, std::size_t index, std::size_t count);
  double (*bus_factor)(int ranks);  // bus bandwidth / algorithm bandwidth, as nccl-tests defines it
  bool puts = false;                // over NCCL's RMA table; the buffers must be symmetric windows
};

inline ncclResult_t all_reduce(const Call& call) {
  return ncclAllReduce(call.send, call.receive, call.count, kElementType, ncclSum, call.comm, call.stream);
}

inline Element all_reduce_expected(RankPosition position, unsigned iteration, std::size_t index,
                                   std::size_t /*count*/) {
  Element sum = 0;
  for (int rank = 0; rank < position.ranks; ++rank) sum += pattern(rank, iteration, index);
  return sum;
}

inline int next_rank(RankPosition position) {
  return (position.rank + 1) % position.ranks;
}
inline int previous_rank(RankPosition position) {
  return (position.rank + position.ranks - 1) % position.ranks;
}

// Each rank sends its buffer to the next rank and receives the buffer of the previous rank.
inline ncclResult_t sendrecv(const Call& call) {
  const int next = next_rank(call.position);
  const int previous = previous_rank(call.position);
  if (const auto result = ncclGroupStart(); result != ncclSuccess) return result;
  const auto sent = ncclSend(call.send, call.count, kElementType, next, call.comm, call.stream);
  const auto received = ncclRecv(call.receive, call.count, kElementType, previous, call.comm, call.stream);
  const auto ended = ncclGroupEnd();
  if (sent != ncclSuccess) return sent;
  return received != ncclSuccess ? received : ended;
}

inline Element sendrecv_expected(RankPosition position, unsigned iteration, std::size_t index, std::size_t /*count*/) {
  return pattern(previous_rank(position), iteration, index);
}

// The same without a group: rank 0 sends first, each other rank sends after it has received.
inline ncclResult_t relay(const Call& call) {
  const auto send = [&] {
    return ncclSend(call.send, call.count, kElementType, next_rank(call.position), call.comm, call.stream);
  };
  const auto receive = [&] {
    return ncclRecv(call.receive, call.count, kElementType, previous_rank(call.position), call.comm, call.stream);
  };
  const auto first = call.position.rank == 0 ? send() : receive();
  if (first != ncclSuccess) return first;
  return call.position.rank == 0 ? receive() : send();
}

// Like sendrecv, but the buffer is sent in kPieces messages of different sizes; all sends and receives are in one
// group.
constexpr std::size_t kPieces = 7;

inline ncclResult_t grouped_sendrecv(const Call& call) {
  auto first_error = ncclGroupStart();
  for (std::size_t piece = 0; piece < kPieces && first_error == ncclSuccess; ++piece) {
    // squares: each piece is longer than the previous one
    const std::size_t from = call.count * piece * piece / (kPieces * kPieces);
    const std::size_t count = call.count * (piece + 1) * (piece + 1) / (kPieces * kPieces) - from;
    if (count == 0) continue;
    first_error = ncclSend(call.send + from, count, kElementType, next_rank(call.position), call.comm, call.stream);
    if (first_error != ncclSuccess) break;
    first_error =
        ncclRecv(call.receive + from, count, kElementType, previous_rank(call.position), call.comm, call.stream);
  }
  const auto ended = ncclGroupEnd();
  return first_error != ncclSuccess ? first_error : ended;
}

// Each rank contributes the first block of its send buffer.
inline ncclResult_t all_gather(const Call& call) {
  const std::size_t block = call.count / static_cast<std::size_t>(call.position.ranks);
  return ncclAllGather(call.send, call.receive, block, kElementType, call.comm, call.stream);
}

inline Element all_gather_expected(RankPosition position, unsigned iteration, std::size_t index, std::size_t count) {
  const std::size_t block = count / static_cast<std::size_t>(position.ranks);
  return pattern(static_cast<int>(index / block), iteration, index % block);
}

// Rank r receives block r of the sum of all send buffers.
inline ncclResult_t reduce_scatter(const Call& call) {
  const std::size_t block = call.count / static_cast<std::size_t>(call.position.ranks);
  return ncclReduceScatter(call.send, call.receive, block, kElementType, ncclSum, call.comm, call.stream);
}

inline Element reduce_scatter_expected(RankPosition position, unsigned iteration, std::size_t index,
                                       std::size_t count) {
  const std::size_t block = count / static_cast<std::size_t>(position.ranks);
  return all_reduce_expected(position, iteration, block * static_cast<std::size_t>(position.rank) + index, count);
}

// The root is the last rank, because rank 0 hosts NCCL's bootstrap.
inline ncclResult_t broadcast(const Call& call) {
  return ncclBroadcast(call.send, call.receive, call.count, kElementType, call.position.ranks - 1, call.comm,
                       call.stream);
}

inline Element broadcast_expected(RankPosition position, unsigned iteration, std::size_t index, std::size_t /*count*/) {
  return pattern(position.ranks - 1, iteration, index);
}

// Block r of each rank's send buffer goes to rank r.
inline ncclResult_t alltoall(const Call& call) {
  const std::size_t block = call.count / static_cast<std::size_t>(call.position.ranks);
  auto first_error = ncclGroupStart();
  for (int rank = 0; rank < call.position.ranks; ++rank) {
    const std::size_t offset = block * static_cast<std::size_t>(rank);
    const auto sent = ncclSend(call.send + offset, block, kElementType, rank, call.comm, call.stream);
    if (first_error == ncclSuccess) first_error = sent;
    const auto received = ncclRecv(call.receive + offset, block, kElementType, rank, call.comm, call.stream);
    if (first_error == ncclSuccess) first_error = received;
  }
  const auto ended = ncclGroupEnd();
  return first_error != ncclSuccess ? first_error : ended;
}

inline Element alltoall_expected(RankPosition position, unsigned iteration, std::size_t index, std::size_t count) {
  const std::size_t block = count / static_cast<std::size_t>(position.ranks);
  return pattern(static_cast<int>(index / block), iteration,
                 block * static_cast<std::size_t>(position.rank) + index % block);
}

inline double once(int /*ranks*/) {
  return 1.0;
}
inline double all_but_own(int ranks) {
  return static_cast<double>(ranks - 1) / ranks;
}
inline double twice_all_but_own(int ranks) {
  return 2.0 * all_but_own(ranks);
}

}  // namespace verbatim::gpu

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
#include "puts.h"
#endif

namespace verbatim::gpu {

inline constexpr std::array kOperations = {
    Operation{"all_reduce", true, false, false, all_reduce, all_reduce_expected, twice_all_but_own},
    Operation{"all_gather", true, true, false, all_gather, all_gather_expected, all_but_own},
    Operation{"reduce_scatter", true, true, true, reduce_scatter, reduce_scatter_expected, all_but_own},
    Operation{"broadcast", true, false, false, broadcast, broadcast_expected, once},
    Operation{"alltoall", false, true, false, alltoall, alltoall_expected, all_but_own},
    Operation{"sendrecv", false, false, false, sendrecv, sendrecv_expected, once},
    Operation{"grouped_sendrecv", false, false, false, grouped_sendrecv, sendrecv_expected, once},
    Operation{"relay", false, false, false, relay, sendrecv_expected, once},
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
    Operation{"put", false, false, false, put, sendrecv_expected, once, true},
    Operation{"alltoall_put", false, true, false, alltoall_put, alltoall_expected, all_but_own, true},
#endif
};

}  // namespace verbatim::gpu
