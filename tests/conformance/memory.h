// Buffers whose every byte is accounted for: poisoned, guarded on both sides, compared as a whole with what must be
// there.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conformance {

// Memory as one end of a transfer sees it. Beside the bytes it keeps the image that they must equal: `write` changes
// both, `expect` only the image, and `intact` compares the whole allocation, gaps and guards included.
class Memory {
 public:
  // `size` bytes that start `offset` bytes behind a page boundary.
  explicit Memory(std::size_t size, std::size_t offset = 0);

  unsigned char* data() { return actual_.data() + start_; }
  std::size_t size() const { return size_; }

  // Content number `seed`: two places that differ in seed or in distance from `at` differ in content.
  void write(std::size_t at, std::size_t size, std::uint64_t seed);
  void expect(std::size_t at, std::size_t size, std::uint64_t seed);

  ::testing::AssertionResult intact() const;
  // Whether [at, at + size) already is as expected: for data that arrives without a completion.
  bool arrived(std::size_t at, std::size_t size) const;

 private:
  std::size_t size_;
  std::vector<unsigned char> actual_;
  std::vector<unsigned char> image_;
  std::size_t start_ = 0;  // of the usable bytes in both
};

}  // namespace conformance
