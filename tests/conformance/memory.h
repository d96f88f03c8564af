// Buffers that are poisoned, have guards at both sides, and are compared as a whole with their expected content.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conformance {

// The memory of one end of a transfer, and an image with its expected content: `write` changes both, `expect` only the
// image, and `intact` compares the whole allocation with the image, including gaps and guards.
class Memory {
 public:
  // `size` bytes that start `offset` bytes after a page boundary.
  explicit Memory(std::size_t size, std::size_t offset = 0);

  unsigned char* data() { return actual_.data() + start_; }
  std::size_t size() const { return size_; }

  // The content depends on `seed` and on the distance from `at`, so that wrong positions are found.
  void write(std::size_t at, std::size_t size, std::uint64_t seed);
  void expect(std::size_t at, std::size_t size, std::uint64_t seed);

  ::testing::AssertionResult intact() const;
  // Whether [at, at + size) has its expected content: for data that arrives without a completion.
  bool arrived(std::size_t at, std::size_t size) const;

 private:
  std::size_t size_;
  std::vector<unsigned char> actual_;
  std::vector<unsigned char> image_;
  std::size_t start_ = 0;  // position of the first usable byte in both vectors
};

}  // namespace conformance
