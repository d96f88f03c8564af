#include "net/transfer/latency_histogram.h"

#include "base/clock.h"
#include "base/mutex.h"

namespace verbatim {
namespace {

struct TickBase {
  std::uint64_t ns = 0;  // 0: not begun
  std::uint64_t ticks = 0;
  double fixed_ns_per_tick = 0;  // 0: not known yet
};

// With readings of at most a microsecond the scale is exact to a ten-thousandth then.
constexpr std::uint64_t kFixedAfterNs = 20 * kNanosecondsPerMillisecond;
// Between two readings of the clock; with an interruption it is more.
constexpr std::uint64_t kUsualReadNs = 1000;
constexpr int kMaxReads = 10;

constinit Mutex g_tick_mutex;
TickBase g_tick_base VERBATIM_GUARDED_BY(g_tick_mutex);

// Both at the same time.
TickBase read_both() {
  TickBase now;
  for (int i = 0; i < kMaxReads; ++i) {
    now.ns = monotonic_ns();
    now.ticks = read_ticks();
    if (monotonic_ns() - now.ns < kUsualReadNs) break;
  }
  return now;
}

}  // namespace

#if !defined(__x86_64__) && !defined(__aarch64__)
std::uint64_t read_ticks() {
  return monotonic_ns();
}
#endif

void begin_tick_scale() {
  const MutexLock lock(g_tick_mutex);
  if (g_tick_base.ns == 0) g_tick_base = read_both();
}

TickScale::TickScale() {
  const MutexLock lock(g_tick_mutex);
  if (g_tick_base.fixed_ns_per_tick == 0) {
    const TickBase now = read_both();
    const std::uint64_t ticks = now.ticks - g_tick_base.ticks;
    const std::uint64_t passed_ns = now.ns - g_tick_base.ns;
    if (ticks != 0) nanoseconds_per_tick_ = static_cast<double>(passed_ns) / static_cast<double>(ticks);
    if (passed_ns >= kFixedAfterNs) g_tick_base.fixed_ns_per_tick = nanoseconds_per_tick_;
  } else {
    nanoseconds_per_tick_ = g_tick_base.fixed_ns_per_tick;
  }
  is_fixed_ = g_tick_base.fixed_ns_per_tick != 0;
}

std::string latency_json(const LatencyStats& stats) {
  if (stats.empty()) return "\"latency\":null";
  std::string latencies;
  for (const LatencyCounts& counts : stats) {
    std::string buckets;
    for (const LatencyBucket& bucket : counts.buckets) {
      if (!buckets.empty()) buckets += ",";
      buckets += "[" + std::to_string(bucket.below_ns) + "," + std::to_string(bucket.count) + "]";
    }
    if (!latencies.empty()) latencies += ",";
    latencies += "\"" + std::string(counts.name) + "\":[" + buckets + "]";
  }
  return "\"latency\":{" + latencies + "}";
}

LatencyHistogram::Counts LatencyHistogram::counts() const {
  Counts counts;
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) counts[place_of(bucket)] = counts_[bucket];
  return counts;
}

std::vector<LatencyBucket> buckets(const LatencyHistogram::Counts& counts, const TickScale& scale) {
  std::vector<LatencyBucket> found;
  for (std::size_t place = 0; place < counts.size(); ++place) {
    if (counts[place] == 0) continue;
    const std::uint64_t below_ns = scale.nanoseconds(LatencyHistogram::first_of(place + 1)) + 1;
    if (!found.empty() && found.back().below_ns == below_ns) {
      found.back().count += counts[place];
    } else {
      found.push_back({below_ns, counts[place]});
    }
  }
  return found;
}

}  // namespace verbatim
