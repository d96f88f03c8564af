// Memory for a transfer with guards on both sides, to find writes that go beyond it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "workload/verify.h"

namespace verbatim::workload {

// The data starts at a page boundary plus `misalignment`; the guards touch it on both sides without a gap.
class GuardedBuffer {
 public:
  static constexpr std::size_t kGuardBytes = 4096;

  // Throws std::bad_alloc. `misalignment` is below kGuardBytes.
  explicit GuardedBuffer(std::size_t bytes, std::size_t misalignment = 0);
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  ~GuardedBuffer();

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  std::size_t capacity() const { return capacity_; }

  // Moves the end of the data, and with it the guard behind, to `bytes`, at most capacity(). Guards are fresh then;
  // the data is undefined.
  void resize(std::size_t bytes);

  struct Damage {
    std::int64_t offset;  // of the damaged byte nearest to the data, relative to data(): negative, or size() and above
    std::uint64_t bytes;  // how many on that side
  };
  // The first side that was written to, the one before the data first.
  std::optional<Damage> damage() const;

 private:
  std::size_t bytes_;
  const std::size_t capacity_;
  const std::size_t mapped_bytes_;
  std::byte* mapped_;
  std::byte* data_;
};

}  // namespace verbatim::workload
