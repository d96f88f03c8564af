// Durations in ticks of the CPU's counter, which costs one instruction to read, counted in log-linear buckets: 16 for
// each power of two, so a bucket is at most 1/16 wide. Converted to nanoseconds when they are read.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "net/transfer/single_writer.h"

namespace verbatim {

// Counters of all CPUs of a host run alike on the machines that NCCL supports (x86: invariant TSC).
#if defined(__x86_64__)
inline std::uint64_t read_ticks() {
  return __builtin_ia32_rdtsc();
}
#elif defined(__aarch64__)
inline std::uint64_t read_ticks() {
  std::uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
}
#else
std::uint64_t read_ticks();
#endif

// The length of a tick, by what has passed since begin_tick_scale(). It is the same for ever once 20 ms have passed,
// so that two readings of a histogram have the same buckets.
class TickScale {
 public:
  TickScale();
  bool is_fixed() const { return is_fixed_; }
  std::uint64_t nanoseconds(std::uint64_t ticks) const {
    return static_cast<std::uint64_t>(static_cast<double>(ticks) * nanoseconds_per_tick_);
  }

 private:
  double nanoseconds_per_tick_ = 1;
  bool is_fixed_ = false;
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
  static constexpr std::size_t kBucketsOfPower = 16;
  static constexpr std::size_t kBuckets = 64 * kBucketsOfPower;
  using Counts = std::array<std::uint64_t, kBuckets>;  // in the order of the durations

  // A double begins with its exponent and the highest bits after the first one: they are the number of the bucket. The
  // mask also takes the sign away: counters of two CPUs may differ by some ticks.
  static std::size_t bucket_of(std::uint64_t ticks) {
    const auto number = static_cast<double>(static_cast<std::int64_t>(ticks));
    return std::bit_cast<std::uint64_t>(number) >> 48 & (kBuckets - 1);
  }
  // The place in the order: exponents begin with 1023, whose last six bits are 63. 0 counts like 2.
  static std::size_t place_of(std::size_t bucket) { return (bucket + kBucketsOfPower) % kBuckets; }
  // The first number of ticks at this place.
  static constexpr std::uint64_t first_of(std::size_t place) {
    return (kBucketsOfPower + place % kBucketsOfPower) << place / kBucketsOfPower >> 4;
  }

  void add(std::uint64_t ticks) { counts_[bucket_of(ticks)] += 1; }
  Counts counts() const;

 private:
  std::array<SingleWriter<std::uint64_t>, kBuckets> counts_ = {};
};

// The buckets that are not empty.
std::vector<LatencyBucket> buckets(const LatencyHistogram::Counts& counts, const TickScale& scale);

}  // namespace verbatim
