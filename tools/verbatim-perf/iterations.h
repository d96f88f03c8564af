// The times of single iterations, as option -I of nccl-tests sums them up.
#pragma once

#include <vector>

namespace verbatim::perf {

// By rank, in microseconds.
using IterationTimes = std::vector<std::vector<double>>;

// Of each iteration the time of its slowest rank.
std::vector<double> slowest_of(const IterationTimes& times);

struct IterationSummary {
  double min = 0;
  double max = 0;
  double mean = 0;
  double p50 = 0;
  double p95 = 0;  // of the nearest rank
  double p99 = 0;
  double deviation = 0;  // of all values, not of a sample

  double variation() const { return mean > 0 ? deviation / mean * 100 : 0; }  // percent
};

// Of all iterations but the first `skipped`; at least one is left.
IterationSummary summary_of(std::vector<double> times, int skipped);

}  // namespace verbatim::perf
