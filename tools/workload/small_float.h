// Floating-point numbers of 8 and 16 bits, which C++ has no types for.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace verbatim::workload {

// A number is a sign, `exponent_bits` and `fraction_bits`. `kLargest` are the bits of the largest finite number.
template <typename Bits, int exponent_bits, int fraction_bits, Bits kLargest>
class SmallFloat {
 public:
  using Stored = Bits;
  using Value = float;

  static float load(Bits bits) {
    const auto magnitude = static_cast<Bits>(bits & ~kSign);
    const auto wide = static_cast<std::uint32_t>(magnitude) << kMissingBits;
    float value = 0;
    if (magnitude > kLargest) {
      value = std::numeric_limits<float>::quiet_NaN();
    } else if (magnitude < kSmallestNormal) {
      value = static_cast<float>(magnitude) * kSmallest;
    } else {
      value = std::bit_cast<float>(wide + kRebias);
    }
    return (bits & kSign) != 0 ? -value : value;
  }

  // The nearest number, of two the even one; of numbers that are too large the largest. Not a number stays so.
  static Bits store(float value) {
    const Bits sign = std::signbit(value) ? kSign : Bits{0};
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return static_cast<Bits>(~Bits{0});
    if (magnitude < kSmallest * static_cast<float>(kSmallestNormal)) {
      return static_cast<Bits>(sign | static_cast<std::uint32_t>(std::lrint(magnitude / kSmallest)));
    }
    // Adds half of what is cut off, and nothing more if the result is even then.
    const auto wide = std::bit_cast<std::uint32_t>(magnitude) - kRebias;
    const std::uint32_t odd = wide >> kMissingBits & 1;
    const std::uint32_t bits = (wide + (1U << (kMissingBits - 1)) - 1 + odd) >> kMissingBits;
    return static_cast<Bits>(sign | std::min<std::uint32_t>(bits, kLargest));
  }

 private:
  static constexpr int kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int kFloatBias = 127;
  static constexpr int kFloatFractionBits = 23;
  static constexpr int kMissingBits = kFloatFractionBits - fraction_bits;
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(kFloatBias - kBias) << kFloatFractionBits;
  static constexpr Bits kSign = Bits{1} << (exponent_bits + fraction_bits);
  static constexpr Bits kSmallestNormal = Bits{1} << fraction_bits;
  static inline const float kSmallest = std::ldexp(1.0F, 1 - kBias - fraction_bits);
};

using Half = SmallFloat<std::uint16_t, 5, 10, 0x7bff>;
using Bfloat16 = SmallFloat<std::uint16_t, 8, 7, 0x7f7f>;
using Float8e4m3 = SmallFloat<std::uint8_t, 4, 3, 0x7e>;
using Float8e5m2 = SmallFloat<std::uint8_t, 5, 2, 0x7b>;

}  // namespace verbatim::workload
