#include "memory.h"

#include <algorithm>
#include <cstring>

namespace conformance {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kGuardBytes = 512;
constexpr unsigned char kPoison = 0xdb;

std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 31;
  x *= 0x9e3779b97f4a7c15U;
  x ^= x >> 29;
  x *= 0xd6e8feb86659fd93U;
  return x ^ (x >> 32);
}

void fill(unsigned char* to, std::size_t size, std::uint64_t seed) {
  const std::uint64_t base = mix(seed + 1);
  for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = mix(base + at);
    std::memcpy(to + at, &word, std::min(sizeof word, size - at));
  }
}

}  // namespace

Memory::Memory(std::size_t size, std::size_t offset)
    : size_(size), actual_(size + offset % kPageBytes + kPageBytes + 2 * kGuardBytes, kPoison), image_(actual_) {
  const auto address = reinterpret_cast<std::uintptr_t>(actual_.data()) + kGuardBytes;
  const std::size_t to_page = (kPageBytes - address % kPageBytes) % kPageBytes;
  start_ = kGuardBytes + to_page + offset % kPageBytes;
}

void Memory::write(std::size_t at, std::size_t size, std::uint64_t seed) {
  fill(actual_.data() + start_ + at, size, seed);
  expect(at, size, seed);
}

void Memory::expect(std::size_t at, std::size_t size, std::uint64_t seed) {
  fill(image_.data() + start_ + at, size, seed);
}

::testing::AssertionResult Memory::intact() const {
  const auto [is, should] = std::mismatch(actual_.begin(), actual_.end(), image_.begin());
  if (is == actual_.end()) return ::testing::AssertionSuccess();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < actual_.size(); ++i) wrong += actual_[i] != image_[i] ? 1U : 0U;
  return ::testing::AssertionFailure() << "wrong bytes: " << wrong << " in a buffer of " << size_ << ", the first at "
                                       << (is - actual_.begin()) - static_cast<std::ptrdiff_t>(start_) << ": is "
                                       << int{*is} << ", should be " << int{*should} << " (poison is " << int{kPoison}
                                       << ")";
}

bool Memory::arrived(std::size_t at, std::size_t size) const {
  // Volatile, because the device writes the memory and the compiler cannot know this.
  const volatile unsigned char* const is = actual_.data() + start_ + at;
  const unsigned char* const should = image_.data() + start_ + at;
  for (std::size_t i = 0; i < size; ++i) {
    if (is[i] != should[i]) return false;
  }
  return true;
}

}  // namespace conformance
