// Memory that is registered, or is to be: address ranges in which overlapping and touching ones have become one. A
// range is looked up whole, never by its beginning alone: two caches may begin at the same address and differ in
// length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace verbatim::kv {

struct Interval {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool operator==(const Interval&) const = default;
};

class IntervalSet {
 public:
  // Ranges that wrap around the address space are refused: false.
  bool add(std::uint64_t begin, std::uint64_t bytes);
  // The index of the interval that holds all of [begin, begin + bytes).
  std::optional<std::size_t> find(std::uint64_t begin, std::uint64_t bytes) const;

  const std::vector<Interval>& all() const { return intervals_; }

 private:
  std::vector<Interval> intervals_;  // ascending, with gaps between them
};

}  // namespace verbatim::kv
