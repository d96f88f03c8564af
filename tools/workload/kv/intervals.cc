#include "workload/kv/intervals.h"

#include <algorithm>

namespace verbatim::kv {

bool IntervalSet::add(std::uint64_t begin, std::uint64_t bytes) {
  std::uint64_t end = 0;
  if (__builtin_add_overflow(begin, bytes, &end)) return false;
  Interval merged{begin, end};
  const auto first = std::lower_bound(intervals_.begin(), intervals_.end(), begin,
                                      [](const Interval& interval, std::uint64_t at) { return interval.end < at; });
  auto last = first;
  for (; last != intervals_.end() && last->begin <= end; ++last) {
    merged.begin = std::min(merged.begin, last->begin);
    merged.end = std::max(merged.end, last->end);
  }
  intervals_.insert(intervals_.erase(first, last), merged);
  return true;
}

std::optional<std::size_t> IntervalSet::find(std::uint64_t begin, std::uint64_t bytes) const {
  std::uint64_t end = 0;
  if (__builtin_add_overflow(begin, bytes, &end)) return std::nullopt;
  const auto after = std::upper_bound(intervals_.begin(), intervals_.end(), begin,
                                      [](std::uint64_t at, const Interval& interval) { return at < interval.begin; });
  if (after == intervals_.begin() || std::prev(after)->end < end) return std::nullopt;
  return static_cast<std::size_t>(std::prev(after) - intervals_.begin());
}

}  // namespace verbatim::kv
