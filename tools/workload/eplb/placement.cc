#include "workload/eplb/placement.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <queue>
#include <utility>

namespace verbatim::eplb {
namespace {

using Rows = std::vector<int>;

// splitmix64, because the distributions of the standard library differ between implementations.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }
  // Approximates the standard normal distribution by the sum of twelve uniform numbers.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(next() >> 11) * 0x1p-53;
    return sum;
  }
  void shuffle(Rows& rows) {
    for (std::size_t i = rows.size(); i > 1; --i) std::swap(rows[i - 1], rows[below(i)]);
  }

 private:
  std::uint64_t state_;
};

std::size_t divide_up(std::size_t value, std::size_t by) {
  return (value + by - 1) / by;
}

Rows one_of_each(std::size_t experts) {
  Rows rows(experts);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// One row for each expert; the remaining rows hold random experts. The order is random.
Rows random_placement(std::size_t experts, std::size_t rows, Random& random) {
  Rows placed = one_of_each(experts);
  while (placed.size() < rows) placed.push_back(static_cast<int>(random.below(experts)));
  random.shuffle(placed);
  return placed;
}

// A load for each expert, in thousandths. A few experts get much more than the others.
std::vector<std::uint64_t> random_load(std::size_t experts, Random& random) {
  std::vector<std::uint64_t> load(experts);
  for (std::uint64_t& one : load)
    one = static_cast<std::uint64_t>(1000 * std::exp2(std::max(-6.0, 1.4 * random.normal()))) + 1;
  return load;
}

void drift(std::vector<std::uint64_t>& load, Random& random) {
  for (std::uint64_t& one : load) {
    one = static_cast<std::uint64_t>(static_cast<double>(one) * std::exp2(0.7 * random.normal())) + 1;
  }
}

// Each additional row goes to the expert with the highest load per row. Then rows are placed in order of falling load,
// each on the rank with the lowest sum that still has a free row.
Rows balanced_placement(const std::vector<std::uint64_t>& load, std::size_t rows, std::size_t ranks) {
  using Weighed = std::pair<double, std::size_t>;
  std::vector<std::size_t> copies(load.size(), 1);
  std::priority_queue<Weighed, std::vector<Weighed>> heaviest;
  for (std::size_t e = 0; e < load.size(); ++e) heaviest.emplace(static_cast<double>(load[e]), load.size() - e);
  for (std::size_t row = load.size(); row < rows; ++row) {
    const std::size_t e = load.size() - heaviest.top().second;
    heaviest.pop();
    ++copies[e];
    heaviest.emplace(static_cast<double>(load[e]) / static_cast<double>(copies[e]), load.size() - e);
  }
  std::vector<Weighed> physical;
  for (std::size_t e = 0; e < load.size(); ++e) {
    for (std::size_t i = 0; i < copies[e]; ++i) {
      physical.emplace_back(-static_cast<double>(load[e]) / static_cast<double>(copies[e]), e);
    }
  }
  std::sort(physical.begin(), physical.end());
  std::priority_queue<Weighed, std::vector<Weighed>, std::greater<>> lightest;
  for (std::size_t rank = 0; rank < ranks; ++rank) lightest.emplace(0.0, rank);
  const std::size_t local = rows / ranks;
  std::vector<std::size_t> used(ranks);
  Rows placed(rows, kEmptyRow);
  for (const auto& [weight, e] : physical) {
    const auto [sum, rank] = lightest.top();
    lightest.pop();
    placed[rank * local + used[rank]++] = static_cast<int>(e);
    if (used[rank] < local) lightest.emplace(sum - weight, rank);
  }
  return placed;
}

// Puts the experts of `after` on the same ranks, but an expert that a rank already held stays in the row where it was.
Rows keep_rows(const Rows& before, const Rows& after, std::size_t ranks) {
  const std::size_t local = after.size() / ranks;
  Rows kept(after.size(), kEmptyRow);
  std::vector<std::size_t> wanted(after.size() + 1);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const auto first = rank * local;
    for (std::size_t i = first; i < first + local; ++i) ++wanted[static_cast<std::size_t>(after[i])];
    for (std::size_t i = first; i < first + local; ++i) {
      if (before[i] == kEmptyRow || wanted[static_cast<std::size_t>(before[i])] == 0) continue;
      --wanted[static_cast<std::size_t>(before[i])];
      kept[i] = before[i];
    }
    std::size_t free = first;
    for (std::size_t i = first; i < first + local; ++i) {
      if (wanted[static_cast<std::size_t>(after[i])] == 0) continue;
      --wanted[static_cast<std::size_t>(after[i])];
      while (kept[free] != kEmptyRow) ++free;
      kept[free] = after[i];
    }
  }
  return kept;
}

// All experts on the first `ranks_used` ranks, with some empty rows among them. All rows of the other ranks are empty.
Rows placement_on(std::size_t ranks_used, const PolicyInput& input, std::size_t rows, Random& random) {
  const std::size_t used = rows / input.ranks * ranks_used;
  Rows placed = one_of_each(input.experts);
  while (placed.size() < used) {
    placed.push_back(random.below(3) == 0 ? kEmptyRow : static_cast<int>(random.below(input.experts)));
  }
  random.shuffle(placed);
  placed.resize(rows, kEmptyRow);
  return placed;
}

Layer make_layer(const PolicyInput& input, std::size_t number, std::size_t rows) {
  Random random(input.seed * 0x100000001b3 + number);
  const std::size_t local = rows / input.ranks;
  Layer layer{number, {}, {}};
  switch (input.policy) {
    case Policy::kIdentity:
      layer.before = random_placement(input.experts, rows, random);
      layer.after = layer.before;
      break;
    case Policy::kShuffle:
      layer.before = random_placement(input.experts, rows, random);
      layer.after = random_placement(input.experts, rows, random);
      break;
    case Policy::kRotate:
      layer.before = random_placement(input.experts, rows, random);
      layer.after = layer.before;
      std::rotate(layer.after.begin(), layer.after.end() - static_cast<std::ptrdiff_t>(local), layer.after.end());
      break;
    case Policy::kHot:
      layer.before = random_placement(input.experts, rows, random);
      layer.after = one_of_each(input.experts);
      layer.after.resize(rows, static_cast<int>(random.below(input.experts)));
      random.shuffle(layer.after);
      break;
    case Policy::kGreedyDrift: {
      std::vector<std::uint64_t> load = random_load(input.experts, random);
      layer.before = balanced_placement(load, rows, input.ranks);
      drift(load, random);
      layer.after = keep_rows(layer.before, balanced_placement(load, rows, input.ranks), input.ranks);
      break;
    }
    case Policy::kScaleUp:
    case Policy::kScaleDown: {
      const std::size_t fewer = divide_up(input.experts, local);
      layer.before = placement_on(fewer, input, rows, random);
      layer.after = placement_on(input.ranks, input, rows, random);
      if (input.policy == Policy::kScaleDown) std::swap(layer.before, layer.after);
      break;
    }
  }
  return layer;
}

bool changes_ranks(Policy policy) {
  return policy == Policy::kScaleUp || policy == Policy::kScaleDown;
}

void check_rows(const Layer& layer, const char* which, const std::vector<int>& rows, const Workload& workload) {
  const std::string where = "layer " + std::to_string(layer.number) + ", " + which;
  if (rows.size() != workload.rows) {
    throw BadInput(where + ": " + std::to_string(rows.size()) + " rows instead of " + std::to_string(workload.rows));
  }
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row] < kEmptyRow || rows[row] >= static_cast<int>(workload.experts)) {
      throw BadInput(where + ", row " + std::to_string(row) + ": expert " + std::to_string(rows[row]) +
                     " is not one of 0 to " + std::to_string(workload.experts - 1));
    }
  }
}

}  // namespace

void check(const Workload& workload) {
  if (workload.ranks == 0 || workload.rows == 0 || workload.rows % workload.ranks != 0) {
    throw BadInput(std::to_string(workload.rows) + " rows are not divisible by " + std::to_string(workload.ranks) +
                   " ranks");
  }
  std::vector<bool> held(workload.experts);
  for (const Layer& layer : workload.layers) {
    check_rows(layer, "old", layer.before, workload);
    check_rows(layer, "new", layer.after, workload);
    held.assign(workload.experts, false);
    for (const int expert : layer.before) {
      if (expert != kEmptyRow) held[static_cast<std::size_t>(expert)] = true;
    }
    for (std::size_t row = 0; row < layer.after.size(); ++row) {
      const int expert = layer.after[row];
      if (expert == kEmptyRow || held[static_cast<std::size_t>(expert)]) continue;
      throw BadInput("layer " + std::to_string(layer.number) + ", new, row " + std::to_string(row) + ": expert " +
                     std::to_string(expert) + " is in no old row of any rank");
    }
  }
}

const std::vector<std::pair<std::string, Policy>>& policies() {
  static const std::vector<std::pair<std::string, Policy>> all{
      {"identity", Policy::kIdentity},
      {"shuffle", Policy::kShuffle},
      {"rotate", Policy::kRotate},
      {"hot", Policy::kHot},
      {"greedy-drift", Policy::kGreedyDrift},
      {"scale-up", Policy::kScaleUp},
      {"scale-down", Policy::kScaleDown},
  };
  return all;
}

Workload make_workload(const PolicyInput& input) {
  const std::size_t rows = input.experts + input.redundant;
  Workload workload{input.ranks, input.experts, rows, {}};
  check(workload);
  if (changes_ranks(input.policy) && divide_up(input.experts, workload.local_rows()) >= input.ranks) {
    throw BadInput(std::to_string(input.experts) + " experts need all of " + std::to_string(input.ranks) +
                   " ranks with " + std::to_string(workload.local_rows()) +
                   " rows each, so no rank is left to add or remove. Next: raise --redundant");
  }
  for (std::size_t layer = 0; layer < input.layers; ++layer) {
    workload.layers.push_back(make_layer(input, layer, rows));
  }
  return workload;
}

std::size_t needed_redundant(Policy policy, std::size_t ranks, std::size_t experts, std::size_t at_least) {
  std::size_t local = divide_up(experts + at_least, ranks);
  if (changes_ranks(policy) && ranks > 1) local = std::max(local, divide_up(experts, ranks - 1));
  return local * ranks - experts;
}

}  // namespace verbatim::eplb
