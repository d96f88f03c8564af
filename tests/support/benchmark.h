// Figures that depend on the machine: measured in rounds and printed, never compared with a limit. tools/check
// --benchmarks reads these lines.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

namespace verbatim::test {

// Prints nothing when nothing was measured.
inline void print_benchmark(const std::string& name, const std::string& unit, std::vector<double> rounds) {
  if (rounds.empty()) return;
  std::sort(rounds.begin(), rounds.end());
  std::printf("benchmark %s: median %.3f (%.3f to %.3f, %zu rounds) %s\n", name.c_str(), rounds[rounds.size() / 2],
              rounds.front(), rounds.back(), rounds.size(), unit.c_str());
}

// `measure` returns the figure of a round.
template <typename Measure>
void run_benchmark(const std::string& name, const std::string& unit, int count, Measure measure) {
  std::vector<double> rounds;
  for (int round = 0; round < count; ++round) rounds.push_back(measure());
  print_benchmark(name, unit, rounds);
}

}  // namespace verbatim::test
