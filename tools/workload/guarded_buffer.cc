#include "workload/guarded_buffer.h"

#include <sys/mman.h>

#include <new>

namespace verbatim::workload {
namespace {

constexpr std::size_t kGuard = GuardedBuffer::kGuardBytes;
// Patterns of a source number that no rank has, so that transfer data in a guard never equals the guard's content.
Pattern before_data() {
  return {~std::uint64_t{0}, 1};
}
Pattern after_data() {
  return {~std::uint64_t{0}, 2};
}

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, std::size_t misalignment)
    : bytes_(bytes), capacity_(bytes), mapped_bytes_(bytes + misalignment + 2 * kGuard) {
  void* const memory = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mapped_ = static_cast<std::byte*>(memory);
  data_ = mapped_ + kGuard + misalignment;
  resize(bytes);
}

void GuardedBuffer::resize(std::size_t bytes) {
  bytes_ = bytes;
  fill(before_data(), data_ - kGuard, kGuard);
  fill(after_data(), data_ + bytes_, kGuard);
}

GuardedBuffer::~GuardedBuffer() {
  munmap(mapped_, mapped_bytes_);
}

std::optional<GuardedBuffer::Damage> GuardedBuffer::damage() const {
  if (const Mismatch before = verify(before_data(), data_ - kGuard, kGuard); before.wrong > 0) {
    // verify() gives the byte farthest from the data: search back from the data for the nearest one
    std::size_t good = 0;
    while (verify(before_data(), data_ - good - 1, 1, kGuard - good - 1).wrong == 0) ++good;
    return Damage{-static_cast<std::int64_t>(good) - 1, before.wrong};
  }
  if (const Mismatch after = verify(after_data(), data_ + bytes_, kGuard); after.wrong > 0) {
    return Damage{static_cast<std::int64_t>(bytes_ + after.first_offset), after.wrong};
  }
  return std::nullopt;
}

}  // namespace verbatim::workload
