// Statistics of measured values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace verbatim::ranks {

// The smallest value that is not below the given part (0 to 1) of the values; 0 for an empty list.
template <typename T>
T percentile(std::vector<T> values, double part) {
  if (values.empty()) return T{};
  const auto rank = static_cast<std::size_t>(std::ceil(part * static_cast<double>(values.size())));
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(std::clamp<std::size_t>(rank, 1, values.size()) - 1);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

}  // namespace verbatim::ranks
