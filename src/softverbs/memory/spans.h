// A list of address ranges of one process.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

// The memory of one step of a message in one process, in order.
class Spans {
 public:
  void add(std::uint64_t address, std::size_t bytes) {
    if (bytes == 0) return;
    items_[count_++] = {reinterpret_cast<void*>(address), bytes};
    total_ += bytes;
  }
  iovec* items() { return items_.data(); }
  std::size_t count() const { return count_; }
  std::size_t total() const { return total_; }

 private:
  std::array<iovec, kMaxSge> items_;
  std::size_t count_ = 0;
  std::size_t total_ = 0;
};

}  // namespace verbatim::softverbs
