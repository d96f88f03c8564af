#include "verbatim-perf/iterations.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace verbatim::perf {

std::vector<double> slowest_of(const IterationTimes& times) {
  std::vector<double> slowest;
  for (const std::vector<double>& of_rank : times) {
    slowest.resize(of_rank.size());
    for (std::size_t i = 0; i < of_rank.size(); ++i) slowest[i] = std::max(slowest[i], of_rank[i]);
  }
  return slowest;
}

IterationSummary summary_of(std::vector<double> times, int skipped) {
  times.erase(times.begin(), times.begin() + skipped);
  std::sort(times.begin(), times.end());
  const auto count = static_cast<double>(times.size());
  const auto nearest = [&times](std::size_t percent) { return times[(times.size() * percent + 99) / 100 - 1]; };
  IterationSummary summary{.min = times.front(),
                           .max = times.back(),
                           .mean = std::accumulate(times.begin(), times.end(), 0.0) / count,
                           .p50 = times[times.size() / 2],
                           .p95 = nearest(95),
                           .p99 = nearest(99)};
  double variance = 0;
  for (const double each : times) variance += (each - summary.mean) * (each - summary.mean) / count;
  summary.deviation = std::sqrt(variance);
  return summary;
}

}  // namespace verbatim::perf
