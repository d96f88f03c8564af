// Durations in ticks of the CPU's counter, which costs one instruction to read, counted in log-linear buckets: 16 for
// each power of two, so a bucket is at most 1/16 wide. Converted to nanoseconds when they are read.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "net/transfer/single_writer.h"

namespace verbatim {

// Counters of all CPUs of a host run alike on the machines that NCCL supports (x86: invariant TSC).
inline std::uint64_t read_ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  std::uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return monotonic_ns();
#endif
}

// The length of a tick, by what has passed since begin_tick_scale().
class TickScale {
 public:
  TickScale();
  std::uint64_t nanoseconds(std::uint64_t ticks) const {
    return static_cast<std::uint64_t>(static_cast<double>(ticks) * nanoseconds_per_tick_);
  }

 private:
  double nanoseconds_per_tick_ = 1;
};

// To be called before anything is measured. Any thread; later calls have no effect.
void begin_tick_scale();

// What a histogram has counted: the buckets that are not empty, in order.
struct LatencyBucket {
  std::uint64_t below_ns = 0;  // durations in it are shorter
  std::uint64_t count = 0;
};
struct LatencyCounts {
  const char* name = nullptr;
  std::vector<LatencyBucket> buckets;
};
using LatencyStats = std::vector<LatencyCounts>;

// The JSON field `latency`: of each measured latency its buckets as [below_ns, count]. null: nothing is measured.
std::string latency_json(const LatencyStats& stats);

// One thread adds, any thread reads.
class LatencyHistogram {
 public:
  static constexpr unsigned kLinearBits = 4;
  static constexpr std::size_t kLinear = std::size_t{1} << kLinearBits;
  static constexpr unsigned kMaxBits = 44;  // longer durations, of an hour and more, count in the last bucket
  static constexpr std::size_t kBuckets = (kMaxBits - kLinearBits + 1) * kLinear;

  static constexpr std::size_t bucket_of(std::uint64_t ticks) {
    if (ticks < kLinear) return ticks;
    const auto shift = static_cast<unsigned>(std::bit_width(ticks)) - kLinearBits - 1;
    const std::size_t bucket = shift * kLinear + (ticks >> shift);
    return bucket < kBuckets ? bucket : kBuckets - 1;
  }
  // The first number of ticks of the bucket.
  static constexpr std::uint64_t first_of(std::size_t bucket) {
    if (bucket < 2 * kLinear) return bucket;
    const std::size_t shift = bucket / kLinear - 1;
    return (bucket - shift * kLinear) << shift;
  }

  void add(std::uint64_t ticks) { counts_[bucket_of(ticks)] += 1; }
  std::vector<LatencyBucket> read(const TickScale& scale) const;

 private:
  std::array<SingleWriter<std::uint64_t>, kBuckets> counts_ = {};
};

}  // namespace verbatim
