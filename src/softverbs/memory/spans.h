// A list of address ranges of one process.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "softverbs/gpu/gpu_address.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

// The memory of one step of a message in one process, in order: host memory and GPU memory (see gpu_address.h).
class Spans {
 public:
  void add(std::uint64_t address, std::size_t bytes) {
    if (bytes == 0) return;
    items_[count_++] = {reinterpret_cast<void*>(address), bytes};
    total_ += bytes;
    addresses_ |= address;
  }
  iovec* items() { return items_.data(); }
  std::size_t count() const { return count_; }
  std::size_t total() const { return total_; }
  bool has_gpu_memory() const { return is_gpu_address(addresses_); }
  // SharedMr::gpu_memory of the region; 0: several regions, or not known.
  std::uint32_t gpu_memory() const { return gpu_memory_; }
  void set_gpu_memory(std::uint32_t number) { gpu_memory_ = number; }

 private:
  std::array<iovec, kMaxSge> items_;
  std::size_t count_ = 0;
  std::size_t total_ = 0;
  std::uint64_t addresses_ = 0;  // all of them, combined by OR
  std::uint32_t gpu_memory_ = 0;
};

// Calls move(to, from, bytes) for each pair of contiguous pieces of both lists, until one list ends.
template <typename Move>
void for_each_pair(Spans& to, Spans& from, Move move) {
  iovec* source = from.items();
  iovec* const last = source + from.count();
  std::size_t used = 0;
  for (iovec* target = to.items(); target != to.items() + to.count(); ++target) {
    std::size_t filled = 0;
    while (filled < target->iov_len && source != last) {
      const std::size_t bytes = std::min(target->iov_len - filled, source->iov_len - used);
      move(static_cast<std::byte*>(target->iov_base) + filled, static_cast<const std::byte*>(source->iov_base) + used,
           bytes);
      filled += bytes;
      used += bytes;
      if (used == source->iov_len) {
        ++source;
        used = 0;
      }
    }
  }
}

}  // namespace verbatim::softverbs
