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

// As nccl-tests names them.
enum class ElementType : std::uint8_t {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kHalf,
  kFloat,
  kDouble,
  kBfloat16,
  kFloat8e4m3,
  kFloat8e5m2,
};
constexpr std::size_t kElementTypes = 12;

std::size_t element_bytes(ElementType type);
const char* element_name(ElementType type);

// kAvg is the sum, divided by the number of ranks at the end; kMulSum is the sum of products of each rank's
// contribution and its multiplier().
enum class ReductionKind : std::uint8_t { kSum, kProd, kMax, kMin, kAvg, kMulSum };
constexpr std::size_t kReductionKinds = 6;

const char* reduction_name(ReductionKind kind);
// 1 or -1: exact in every type.
int multiplier(std::uint64_t source);
// The largest number of ranks whose sum is exact in any order. Other reductions are exact for any number.
int max_exact_ranks(ElementType type);

// What one rank contributes to a reduction of `kind`. Integers are the bytes of a Pattern, odd for products. Floats are
// whole numbers so small that the sum of max_exact_ranks() of them is exact in any order; for products 1 or -1; for the
// largest and the smallest number any finite one. Offsets and sizes are multiples of the element size.
class Elements final : public Content {
 public:
  Elements(ElementType type, std::uint64_t source, std::uint64_t step, ReductionKind kind = ReductionKind::kSum);
  void produce(void* out, std::size_t bytes, std::uint64_t offset) const override;

 private:
  ElementType type_;
  ReductionKind kind_;
  Pattern pattern_;
};

// The element-wise reduction over sources 0 to `sources` - 1. Integers wrap. Offsets and sizes are multiples of the
// element size.
class Reduced final : public Content {
 public:
  Reduced(ElementType type, ReductionKind kind, std::uint64_t sources, std::uint64_t step);
  void produce(void* out, std::size_t bytes, std::uint64_t offset) const override;

 private:
  ElementType type_;
  ReductionKind kind_;
  std::vector<Elements> contributions_;
};

// One step of a reduction: two operands, each a partial result or a rank's contribution.
struct Reduction {
  ElementType type;
  ReductionKind kind;
  int left_multiplier = 1;
  int right_multiplier = 1;
  int divisor = 1;  // of the result
};

// into[i] = left[i] and right[i] reduced. `bytes` is a multiple of the element size. `into` may be `left` or `right`.
void reduce_elements(const Reduction& reduction, void* into, const void* left, const void* right, std::size_t bytes);

}  // namespace verbatim::workload
