#include "support/verbs_data.h"

#include <algorithm>
#include <cstring>

namespace verbatim::test {
namespace {

constexpr std::size_t kPageBytes = 4096;

std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

std::uint64_t pattern_word(std::uint64_t seed, std::uint64_t word) {
  return mix(mix(seed) ^ word);
}

}  // namespace

std::byte pattern_byte(std::uint64_t seed, std::uint64_t position) {
  return static_cast<std::byte>(pattern_word(seed, position / 8) >> (8 * (position % 8)));
}

void fill_pattern(std::span<std::byte> bytes, std::uint64_t seed, std::uint64_t start) {
  std::size_t i = 0;
  for (; i < bytes.size() && (start + i) % 8 != 0; ++i) bytes[i] = pattern_byte(seed, start + i);
  for (; i + 8 <= bytes.size(); i += 8) {
    const std::uint64_t word = pattern_word(seed, (start + i) / 8);
    std::memcpy(&bytes[i], &word, sizeof(word));
  }
  for (; i < bytes.size(); ++i) bytes[i] = pattern_byte(seed, start + i);
}

std::optional<std::size_t> find_wrong_byte(std::span<const std::byte> bytes, std::uint64_t seed, std::uint64_t start) {
  std::size_t i = 0;
  while (i < bytes.size()) {
    if ((start + i) % 8 == 0 && i + 8 <= bytes.size()) {
      const std::uint64_t word = pattern_word(seed, (start + i) / 8);
      if (std::memcmp(&bytes[i], &word, sizeof(word)) == 0) {
        i += 8;
        continue;
      }
    }
    if (bytes[i] != pattern_byte(seed, start + i)) return i;
    ++i;
  }
  return std::nullopt;
}

GuardedBuffer::GuardedBuffer(std::size_t size, std::size_t misalign) {
  const std::size_t total = kPageBytes + kPageBytes + misalign + size + kPageBytes;  // alignment, guard, payload, guard
  storage_ = std::make_unique_for_overwrite<std::byte[]>(total);
  all_ = {storage_.get(), total};
  const std::size_t past_page = reinterpret_cast<std::uintptr_t>(storage_.get()) % kPageBytes;
  payload_ = all_.subspan(kPageBytes + (kPageBytes - past_page) + misalign, size);
  poison();
}

void GuardedBuffer::poison() const {
  std::fill(all_.begin(), all_.end(), kPoison);
}

std::string GuardedBuffer::untouched_outside(std::size_t offset, std::size_t length) const {
  const auto changed = [](std::byte byte) { return byte != kPoison; };
  const auto first = static_cast<std::size_t>(payload_.data() - all_.data()) + offset;
  const auto before = all_.first(first);
  const auto after = all_.subspan(first + length);
  if (const auto at = std::find_if(before.begin(), before.end(), changed); at != before.end()) {
    return std::to_string(before.end() - at) + " bytes before the range changed";
  }
  if (const auto at = std::find_if(after.begin(), after.end(), changed); at != after.end()) {
    return "byte " + std::to_string(at - after.begin()) + " after the range changed";
  }
  return {};
}

}  // namespace verbatim::test
