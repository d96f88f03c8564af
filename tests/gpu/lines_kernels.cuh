// The kernels of lines.cu, and the layout of the memory that they poll.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace verbatim::gpu {

using Word = unsigned long long;  // atomicAdd takes this type

constexpr std::size_t kLineBytes = 128;
constexpr unsigned kWordsOfLine = kLineBytes / sizeof(Word);
constexpr unsigned kThreadsOfLine = kLineBytes / 16;

constexpr std::size_t kMaxMessage = std::size_t{1} << 20U;
// Contents of messages. Successive messages to one slot are of different generations, because no number of slots is a
// multiple of this.
constexpr unsigned kGenerations = 5;
constexpr unsigned kLineSlots = 2;  // one message lands while the kernel polls, the next one is queued behind it
constexpr unsigned kSignalSlots = 16;
constexpr std::size_t kSignalSlotBytes = std::size_t{128} << 10U;
constexpr std::size_t kSignalsOffset = kLineSlots * kMaxMessage;  // of the signals' words in the target, one a line
constexpr std::size_t kPiece = std::size_t{2} << 20U;             // allocations are multiples, as dma-bufs need
constexpr std::size_t kTargetBytes = kSignalsOffset + kPiece;
constexpr std::size_t kSourceBytes = 3 * kPiece;
static_assert(kSignalSlots * kSignalSlotBytes <= kSignalsOffset && kSourceBytes >= kGenerations * kMaxMessage);

constexpr unsigned kThreadsOfBlock = 256;
constexpr Word kWaitNs = 5'000'000'000;  // for one message, in a kernel
// A word of the message of `generation`. It differs between any two generations.
__host__ __device__ constexpr Word content(unsigned generation, std::size_t line, unsigned word) {
  return (line * kWordsOfLine + word + 1) * 0x9e3779b97f4a7c15U + (generation + Word{1}) * 0xd6e8feb86659fd93U;
}

__host__ __device__ constexpr unsigned generation_of(Word message) {
  return static_cast<unsigned>(message % kGenerations);
}

// What the kernels have seen; in device memory.
struct Seen {
  Word torn;       // lines
  Word late;       // messages
  Word in_flight;  // reads of four lines by a warp that found new and old ones
  Word timeouts;   // warps or blocks that have given up
};

// Arguments of both kernels. All pointers are device pointers.
struct Polling {
  const Word* data;
  std::size_t slot_words;  // distance of the slots
  unsigned slots;
  unsigned lines;  // of a message
  Word messages;
  const Word* signals;  // the first word of a line for each slot
  Word* arrived;        // for each slot, how many warps have seen its messages
  Word* acks;           // in host memory: for each slot, the number of the last message seen, counted from 1
  Seen* seen;
};

constexpr unsigned kAckStride = 64 / sizeof(Word);

static __device__ Word now_ns() {
  Word ns = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// One 16-byte load, as LL128 reads lines.
__device__ void load_pair(const Word* from, Word& first, Word& second) {
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

__device__ Word load_acquire(const Word* from) {
  Word value = 0;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ void acknowledge(const Polling& polling, unsigned slot, Word message) {
  __threadfence_system();
  *const_cast<volatile Word*>(polling.acks + slot * kAckStride) = message + 1;
}

// Each warp polls four lines of every message until all of them are new, flags and data.
__global__ void poll_lines(Polling polling) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned lane = threadIdx.x % 32;
  const unsigned line = thread / kThreadsOfLine;
  const unsigned pair = thread % kThreadsOfLine;
  const bool active = line < polling.lines;
  const bool has_flag = pair == kThreadsOfLine - 1;
  const unsigned line_mask = 0xffU << (lane & ~(kThreadsOfLine - 1));
  constexpr unsigned kFlagLanes = 0x80808080U;
  const unsigned active_flags = __ballot_sync(~0U, active) & kFlagLanes;
  const Word warps = static_cast<Word>(gridDim.x) * (blockDim.x / 32);
  Word torn = 0;
  Word in_flight = 0;
  for (Word message = 0; message < polling.messages; ++message) {
    const auto slot = static_cast<unsigned>(message % polling.slots);
    const unsigned generation = generation_of(message);
    const Word first = content(generation, line, 2 * pair);
    const Word second = content(generation, line, 2 * pair + 1);
    const Word* const from = polling.data + slot * polling.slot_words + line * std::size_t{kWordsOfLine} + 2 * pair;
    const Word start = now_ns();
    bool line_torn = false;
    bool expired = false;
    for (unsigned polls = 1;; ++polls) {
      Word x = first;
      Word y = second;
      if (active) load_pair(from, x, y);
      const unsigned flags = __ballot_sync(~0U, has_flag && y == second);
      const unsigned wrong = __ballot_sync(~0U, x != first || y != second);
      const bool flag_is_new = (flags & line_mask) != 0;
      line_torn = line_torn || (flag_is_new && (wrong & line_mask) != 0);
      in_flight += (flags & active_flags) != 0 && (flags & active_flags) != active_flags ? 1 : 0;
      if (wrong == 0) break;
      if (polls % 1024 == 0) expired = __any_sync(~0U, now_ns() - start > kWaitNs) != 0;
      if (expired) break;
    }
    torn += line_torn && has_flag ? 1 : 0;
    if (expired) {
      if (lane == 0) atomicAdd(&polling.seen->timeouts, Word{1});
      break;
    }
    if (lane == 0 && atomicAdd(&polling.arrived[slot], Word{1}) + 1 == warps * (message / polling.slots + 1)) {
      acknowledge(polling, slot, message);
    }
  }
  if (torn != 0) atomicAdd(&polling.seen->torn, torn);
  if (lane == 0 && in_flight != 0) atomicAdd(&polling.seen->in_flight, in_flight);
}

// One block. A thread waits for each signal, then all threads read the data.
__global__ void await_signals(Polling polling) {
  __shared__ bool expired;
  if (threadIdx.x == 0) expired = false;
  Word late = 0;
  const unsigned pairs = polling.lines * kThreadsOfLine;
  for (Word message = 0; message < polling.messages; ++message) {
    const auto slot = static_cast<unsigned>(message % polling.slots);
    if (threadIdx.x == 0) {
      const Word* const signal = polling.signals + slot * std::size_t{kWordsOfLine};
      const Word start = now_ns();
      for (unsigned polls = 1; load_acquire(signal) != message + 1; ++polls) {
        if (polls % 1024 == 0 && now_ns() - start > kWaitNs) {
          expired = true;
          break;
        }
      }
    }
    __syncthreads();
    if (expired) break;
    bool wrong = false;
    for (unsigned pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
      const unsigned line = pair / kThreadsOfLine;
      const unsigned word = 2 * (pair % kThreadsOfLine);
      Word x = 0;
      Word y = 0;
      load_pair(polling.data + slot * polling.slot_words + 2 * std::size_t{pair}, x, y);
      wrong = wrong || x != content(generation_of(message), line, word) ||
              y != content(generation_of(message), line, word + 1);
    }
    const int any_wrong = __syncthreads_or(wrong ? 1 : 0);
    if (threadIdx.x == 0) {
      late += any_wrong != 0 ? 1 : 0;
      acknowledge(polling, slot, message);
    }
  }
  if (threadIdx.x != 0) return;
  polling.seen->late = late;
  polling.seen->timeouts = expired ? 1 : 0;
}

// Memory that both processes and the kernels share.
struct Shared {
  Word acks[kSignalSlots * kAckStride];
};

}  // namespace verbatim::gpu
