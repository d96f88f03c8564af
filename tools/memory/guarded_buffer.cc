#include "memory/guarded_buffer.h"

#include <array>

#include "memory/content.h"

namespace verbatim::memory {
namespace {

constexpr std::size_t kGuard = GuardedBuffer::kGuardBytes;
// Patterns of a source number that no rank has, so that transfer data in a guard never equals the guard's content.
workload::Pattern before_data() {
  return {~std::uint64_t{0}, 1};
}
workload::Pattern after_data() {
  return {~std::uint64_t{0}, 2};
}

}  // namespace

GuardedBuffer::GuardedBuffer(Memory& memory, std::size_t bytes, std::size_t misalignment)
    : memory_(memory),
      bytes_(bytes),
      capacity_(bytes),
      data_(memory.allocate(bytes + misalignment + 2 * kGuard) + kGuard + misalignment) {
  resize(bytes);
}

void GuardedBuffer::resize(std::size_t bytes) {
  bytes_ = bytes;
  fill(memory_, before_data(), data_ - kGuard, kGuard);
  fill(memory_, after_data(), data_ + bytes_, kGuard);
}

std::optional<GuardedBuffer::Damage> GuardedBuffer::damage() const {
  std::array<std::byte, kGuard> guard{};
  memory_.download(guard.data(), data_ - kGuard, kGuard);
  if (const workload::Mismatch before = workload::verify(before_data(), guard.data(), kGuard); before.wrong > 0) {
    // verify() gives the byte farthest from the data: search back from the data for the nearest one
    std::size_t at = kGuard;
    while (workload::verify(before_data(), &guard[at - 1], 1, at - 1).wrong == 0) --at;
    return Damage{static_cast<std::int64_t>(at) - 1 - static_cast<std::int64_t>(kGuard), before.wrong};
  }
  memory_.download(guard.data(), data_ + bytes_, kGuard);
  if (const workload::Mismatch after = workload::verify(after_data(), guard.data(), kGuard); after.wrong > 0) {
    return Damage{static_cast<std::int64_t>(bytes_ + after.first_offset), after.wrong};
  }
  return std::nullopt;
}

}  // namespace verbatim::memory
