// The content of rows. It depends on the expert and not on the row that holds it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "workload/content.h"

namespace verbatim::eplb {

class Contents {
 public:
  explicit Contents(std::uint64_t seed) : seed_(seed) {}

  // Differs in each iteration, so that stale data is found.
  workload::Pattern expert(std::uint64_t iteration, std::size_t layer, std::size_t expert, std::size_t tensor) const {
    return {seed_ + (iteration << 32), (std::uint64_t{layer} << 40) | (std::uint64_t{expert} << 8) | tensor};
  }
  // The content of rows without an expert, and of rows that are not written.
  workload::Pattern poison(std::size_t row, std::size_t tensor) const {
    return {~seed_, (std::uint64_t{row} << 8) | tensor};
  }

 private:
  const std::uint64_t seed_;
};

}  // namespace verbatim::eplb
