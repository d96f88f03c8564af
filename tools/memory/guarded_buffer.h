// Memory for a transfer, with guard bytes before and after the data that show writes outside of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "memory/memory.h"

namespace verbatim::memory {

// The data starts at a page boundary plus `misalignment`. The guards adjoin it on both sides without a gap. The memory
// is freed with `memory`.
class GuardedBuffer {
 public:
  static constexpr std::size_t kGuardBytes = 4096;

  // Throws Failure. `misalignment` is below kGuardBytes.
  GuardedBuffer(Memory& memory, std::size_t bytes, std::size_t misalignment = 0);
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  std::size_t capacity() const { return capacity_; }

  // Moves the end of the data to `bytes` (at most capacity()) and rewrites both guards. The data is undefined
  // afterwards.
  void resize(std::size_t bytes);

  struct Damage {
    std::int64_t offset;  // of the damaged byte nearest to the data, relative to data(): negative, or size() and above
    std::uint64_t bytes;  // how many on that side
  };
  // Checks the guard before the data first, then the guard behind it. Returns the first damage found.
  std::optional<Damage> damage() const;

 private:
  Memory& memory_;
  std::size_t bytes_;
  const std::size_t capacity_;
  std::byte* const data_;
};

}  // namespace verbatim::memory
