// The operations that nccl_run can run and what each must deliver. A new operation is one more row in kOperations.
#pragma once

#include <nccl.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace verbatim::gpu {

// Elements are 32-bit words and sums wrap, so that every bit of a result is known whatever the order of additions.
using Element = std::uint32_t;
constexpr ncclDataType_t kElementType = ncclUint32;

// What `rank` contributes at `index` in `iteration`: a mix of all three, so that a word that arrives at a wrong place,
// from a wrong rank or from an earlier iteration differs from the right one.
constexpr Element pattern(int rank, unsigned iteration, std::size_t index) {
  std::uint64_t x = index + 0x9e3779b97f4a7c15U * (static_cast<std::uint64_t>(rank) + 1);
  x ^= static_cast<std::uint64_t>(iteration) << 40U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return static_cast<Element>(x >> 32U);
}

struct Place {
  int rank;
  int ranks;
};

// One call of an operation: device buffers of `count` elements each, on every rank.
struct Call {
  const Element* send;
  Element* receive;
  std::size_t count;
  Place place;
  ncclComm_t comm;
  cudaStream_t stream;
};

struct Operation {
  const char* name;
  bool count_is_multiple_of_ranks;  // the buffer is cut into one equal block a rank
  ncclResult_t (*enqueue)(const Call& call);
  Element (*expected)(Place place, unsigned iteration, std::size_t index, std::size_t count);
  double (*bus_factor)(int ranks);  // bus bandwidth / algorithm bandwidth, as nccl-tests defines it
};

inline ncclResult_t all_reduce(const Call& call) {
  return ncclAllReduce(call.send, call.receive, call.count, kElementType, ncclSum, call.comm, call.stream);
}

inline Element all_reduce_expected(Place place, unsigned iteration, std::size_t index, std::size_t /*count*/) {
  Element sum = 0;
  for (int rank = 0; rank < place.ranks; ++rank) sum += pattern(rank, iteration, index);
  return sum;
}

// Each rank sends its buffer to the next one and receives that of the one before.
inline ncclResult_t sendrecv(const Call& call) {
  const int next = (call.place.rank + 1) % call.place.ranks;
  const int previous = (call.place.rank + call.place.ranks - 1) % call.place.ranks;
  if (const auto result = ncclGroupStart(); result != ncclSuccess) return result;
  const auto sent = ncclSend(call.send, call.count, kElementType, next, call.comm, call.stream);
  const auto received = ncclRecv(call.receive, call.count, kElementType, previous, call.comm, call.stream);
  const auto ended = ncclGroupEnd();
  if (sent != ncclSuccess) return sent;
  return received != ncclSuccess ? received : ended;
}

inline Element sendrecv_expected(Place place, unsigned iteration, std::size_t index, std::size_t /*count*/) {
  return pattern((place.rank + place.ranks - 1) % place.ranks, iteration, index);
}

// Each rank contributes the first block of its send buffer.
inline ncclResult_t all_gather(const Call& call) {
  const std::size_t block = call.count / static_cast<std::size_t>(call.place.ranks);
  return ncclAllGather(call.send, call.receive, block, kElementType, call.comm, call.stream);
}

inline Element all_gather_expected(Place place, unsigned iteration, std::size_t index, std::size_t count) {
  const std::size_t block = count / static_cast<std::size_t>(place.ranks);
  return pattern(static_cast<int>(index / block), iteration, index % block);
}

// Block r of each rank's send buffer goes to rank r.
inline ncclResult_t alltoall(const Call& call) {
  const std::size_t block = call.count / static_cast<std::size_t>(call.place.ranks);
  auto first_error = ncclGroupStart();
  for (int rank = 0; rank < call.place.ranks; ++rank) {
    const std::size_t offset = block * static_cast<std::size_t>(rank);
    const auto sent = ncclSend(call.send + offset, block, kElementType, rank, call.comm, call.stream);
    if (first_error == ncclSuccess) first_error = sent;
    const auto received = ncclRecv(call.receive + offset, block, kElementType, rank, call.comm, call.stream);
    if (first_error == ncclSuccess) first_error = received;
  }
  const auto ended = ncclGroupEnd();
  return first_error != ncclSuccess ? first_error : ended;
}

inline Element alltoall_expected(Place place, unsigned iteration, std::size_t index, std::size_t count) {
  const std::size_t block = count / static_cast<std::size_t>(place.ranks);
  return pattern(static_cast<int>(index / block), iteration,
                 block * static_cast<std::size_t>(place.rank) + index % block);
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

constexpr std::array kOperations = {
    Operation{"all_reduce", false, all_reduce, all_reduce_expected, twice_all_but_own},
    Operation{"sendrecv", false, sendrecv, sendrecv_expected, once},
    Operation{"all_gather", true, all_gather, all_gather_expected, all_but_own},
    Operation{"alltoall", true, alltoall, alltoall_expected, all_but_own},
};

}  // namespace verbatim::gpu
