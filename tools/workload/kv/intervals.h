// Address ranges that are registered or will be. Overlapping and adjacent ranges are merged. A look-up needs the start
// and the length, because two caches may start at the same address and differ in length.
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
  // Returns false for a range that wraps around the address space.
  bool add(std::uint64_t begin, std::uint64_t bytes);
  // The index of the interval that contains all of [begin, begin + bytes).
  std::optional<std::size_t> find(std::uint64_t begin, std::uint64_t bytes) const;

  const std::vector<Interval>& all() const { return intervals_; }

 private:
  std::vector<Interval> intervals_;  // ascending, with gaps between them
};

}  // namespace verbatim::kv
