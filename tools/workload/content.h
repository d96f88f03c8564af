// The content of test buffers. Each byte depends on the rank that sent it, on the step and on the offset, so that
// verify() finds bytes that are swapped, shifted, stale or missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace verbatim::workload {

// A function from an offset to a byte, without state. Safe to call from several threads.
class Content {
 public:
  Content() = default;
  Content(const Content&) = default;
  Content& operator=(const Content&) = default;
  virtual ~Content() = default;

  // Writes bytes [offset, offset + bytes) of the content to `out`.
  virtual void produce(void* out, std::size_t bytes, std::uint64_t offset) const = 0;
};

// Pseudo-random bytes, little-endian words of a 64-bit mix of source, step and offset.
class Pattern final : public Content {
 public:
  Pattern(std::uint64_t source, std::uint64_t step);
  void produce(void* out, std::size_t bytes, std::uint64_t offset) const override;

 private:
  std::uint64_t word(std::uint64_t index) const;

  std::uint64_t key_;
};

enum class ElementType : std::uint8_t { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat };

std::size_t element_bytes(ElementType type);
const char* element_name(ElementType type);

// What one rank contributes to a sum. Integers are the bytes of a Pattern. Floats are whole numbers below 2^16, so
// that a sum of up to 256 of them is exact in any order. Offsets and sizes are multiples of the element size.
class Elements final : public Content {
 public:
  Elements(ElementType type, std::uint64_t source, std::uint64_t step);
  void produce(void* out, std::size_t bytes, std::uint64_t offset) const override;

 private:
  ElementType type_;
  Pattern pattern_;
};

// The element-wise sum over sources 0 to `sources` - 1. Integers wrap. Offsets and sizes are multiples of the element
// size.
class Sum final : public Content {
 public:
  Sum(ElementType type, std::uint64_t sources, std::uint64_t step);
  void produce(void* out, std::size_t bytes, std::uint64_t offset) const override;

 private:
  ElementType type_;
  std::vector<Elements> contributions_;
};

// into[i] = left[i] + right[i]. `bytes` is a multiple of the element size. `into` may be `left` or `right`.
void add_elements(ElementType type, void* into, const void* left, const void* right, std::size_t bytes);

}  // namespace verbatim::workload
