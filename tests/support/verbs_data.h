// Test data that makes a misplaced byte detectable: contents depend on a seed and on the position, and guard bytes
// surround every buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace verbatim::test {

// The byte at `position` of pattern `seed`. It has no short period in either argument.
std::byte pattern_byte(std::uint64_t seed, std::uint64_t position);

// Writes pattern `seed` into `bytes`; the first byte has position `start`.
void fill_pattern(std::span<std::byte> bytes, std::uint64_t seed, std::uint64_t start = 0);

// Index of the first byte that differs from pattern `seed`.
std::optional<std::size_t> find_wrong_byte(std::span<const std::byte> bytes, std::uint64_t seed,
                                           std::uint64_t start = 0);

// A payload of `size` bytes that starts `misalign` bytes after a page boundary, with a guard of at least one page on
// both sides. Guards and payload are filled with kPoison at first.
class GuardedBuffer {
 public:
  static constexpr std::byte kPoison{0xA5};

  explicit GuardedBuffer(std::size_t size, std::size_t misalign = 0);

  std::byte* data() const { return payload_.data(); }
  std::size_t size() const { return payload_.size(); }
  std::span<std::byte> bytes() const { return payload_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data()); }
  void poison() const;

  // Checks that every guard byte, and every payload byte outside [offset, offset + length), is still kPoison. Returns
  // an empty string, or a line that names the first changed byte.
  std::string untouched_outside(std::size_t offset, std::size_t length) const;

 private:
  std::unique_ptr<std::byte[]> storage_;
  std::span<std::byte> all_;
  std::span<std::byte> payload_;
};

}  // namespace verbatim::test
