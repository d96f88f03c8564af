#include "workload/content.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "workload/small_float.h"

namespace verbatim::workload {
namespace {

static_assert(std::endian::native == std::endian::little, "patterns are defined as little-endian words");

constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
constexpr std::size_t kBlockBytes = 4096;
constexpr std::uint64_t kWeyl = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: neighbours differ in half of their bits

// The finaliser of splitmix64. It is a bijection: different inputs give different words.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A type that C++ has.
template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

// What is known of a type. `contribution` are the bits of a contribution to a sum: max_exact_ranks() of them are exact.
struct TypeFacts {
  const char* name;
  std::size_t bytes;
  std::uint64_t contribution;  // 0: integers, all bits
  int max_ranks;
};

constexpr TypeFacts kTypes[kElementTypes] = {
    {"int8", 1, 0, 256},     {"uint8", 1, 0, 256},      {"int32", 4, 0, 256},
    {"uint32", 4, 0, 256},   {"int64", 8, 0, 256},      {"uint64", 8, 0, 256},
    {"half", 2, 7, 256},     {"float", 4, 0xffff, 256}, {"double", 8, 0xffffffff, 256},
    {"bfloat16", 2, 1, 256}, {"f8e4m3", 1, 1, 16},      {"f8e5m2", 1, 1, 8},
};

const TypeFacts& facts_of(ElementType type) {
  return kTypes[static_cast<std::size_t>(type)];
}

// Calls `run` with the codec of a type.
template <typename Run>
void with_codec(ElementType type, const Run& run) {
  switch (type) {
    case ElementType::kInt8:
      return run(Plain<std::int8_t>{});
    case ElementType::kUint8:
      return run(Plain<std::uint8_t>{});
    case ElementType::kInt32:
      return run(Plain<std::int32_t>{});
    case ElementType::kUint32:
      return run(Plain<std::uint32_t>{});
    case ElementType::kInt64:
      return run(Plain<std::int64_t>{});
    case ElementType::kUint64:
      return run(Plain<std::uint64_t>{});
    case ElementType::kHalf:
      return run(Half{});
    case ElementType::kFloat:
      return run(Plain<float>{});
    case ElementType::kDouble:
      return run(Plain<double>{});
    case ElementType::kBfloat16:
      return run(Bfloat16{});
    case ElementType::kFloat8e4m3:
      return run(Float8e4m3{});
    case ElementType::kFloat8e5m2:
      return run(Float8e5m2{});
  }
}

// Integers wrap: they are added and multiplied as unsigned numbers of 64 bits, whose low bits are the same.
template <typename T>
T add(T left, T right) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(left) + static_cast<std::uint64_t>(right));
  } else {
    return left + right;
  }
}

template <typename T>
T multiply(T left, T right) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(left) * static_cast<std::uint64_t>(right));
  } else {
    return left * right;
  }
}

template <typename T>
T divide(T value, int divisor) {
  using Wide = std::conditional_t<std::is_integral_v<T>,
                                  std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>, T>;
  return static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(divisor));
}

// A number with these bits. What is not finite, or 0 with a sign, loses the upper two bits.
template <typename Codec>
typename Codec::Stored finite_number(std::uint64_t bits) {
  typename Codec::Stored stored;
  std::memcpy(&stored, &bits, sizeof stored);
  if (const auto value = Codec::load(stored); std::isfinite(value) && value != 0) return stored;
  bits &= (std::uint64_t{1} << (8 * sizeof stored - 2)) - 1;
  std::memcpy(&stored, &bits, sizeof stored);
  return stored;
}

// What these bits of a Pattern contribute. `mask` is TypeFacts::contribution.
template <typename Codec>
typename Codec::Stored contributed(ReductionKind kind, std::uint64_t bits, std::uint64_t mask) {
  using Value = typename Codec::Value;
  if (kind == ReductionKind::kMax || kind == ReductionKind::kMin) return finite_number<Codec>(bits);
  if (kind != ReductionKind::kProd) return Codec::store(static_cast<Value>(bits & mask));
  if (mask == 0) return Codec::store(static_cast<Value>(bits | 1));
  return Codec::store(static_cast<Value>(bits % 2 == 0 ? 1 : -1));
}

template <typename Codec, typename Combine>
void for_each_element(void* into, const void* left, const void* right, std::size_t bytes, const Combine& combine) {
  using Stored = typename Codec::Stored;
  auto* const to = static_cast<std::byte*>(into);
  const auto* const l = static_cast<const std::byte*>(left);
  const auto* const r = static_cast<const std::byte*>(right);
  for (std::size_t at = 0; at + sizeof(Stored) <= bytes; at += sizeof(Stored)) {
    Stored a;
    Stored b;
    std::memcpy(&a, l + at, sizeof a);
    std::memcpy(&b, r + at, sizeof b);
    const Stored result = Codec::store(combine(Codec::load(a), Codec::load(b)));
    std::memcpy(to + at, &result, sizeof result);
  }
}

}  // namespace

Pattern::Pattern(std::uint64_t source, std::uint64_t step) : key_(mix(mix(source + kWeyl) + step)) {}

std::uint64_t Pattern::word(std::uint64_t index) const {
  return mix(key_ + index * kWeyl);
}

void Pattern::produce(void* out, std::size_t bytes, std::uint64_t offset) const {
  auto* to = static_cast<std::byte*>(out);
  std::uint64_t index = offset / kWordBytes;
  if (const std::size_t skip = offset % kWordBytes; skip != 0) {
    const std::uint64_t first = word(index++) >> (8 * skip);
    const std::size_t part = std::min(bytes, kWordBytes - skip);
    std::memcpy(to, &first, part);
    to += part;
    bytes -= part;
  }
  for (; bytes >= kWordBytes; bytes -= kWordBytes, to += kWordBytes) {
    const std::uint64_t whole = word(index++);
    std::memcpy(to, &whole, kWordBytes);
  }
  if (bytes > 0) {
    const std::uint64_t last = word(index);
    std::memcpy(to, &last, bytes);
  }
}

std::size_t element_bytes(ElementType type) {
  return facts_of(type).bytes;
}

const char* element_name(ElementType type) {
  return facts_of(type).name;
}

const char* reduction_name(ReductionKind kind) {
  constexpr const char* kNames[kReductionKinds] = {"sum", "prod", "max", "min", "avg", "mulsum"};
  return kNames[static_cast<std::size_t>(kind)];
}

int multiplier(std::uint64_t source) {
  return source % 2 == 0 ? 1 : -1;
}

int max_exact_ranks(ElementType type) {
  return facts_of(type).max_ranks;
}

Elements::Elements(ElementType type, std::uint64_t source, std::uint64_t step, ReductionKind kind)
    : type_(type), kind_(kind), pattern_(source, step) {}

void Elements::produce(void* out, std::size_t bytes, std::uint64_t offset) const {
  pattern_.produce(out, bytes, offset);
  const std::uint64_t mask = facts_of(type_).contribution;
  if (mask == 0 && kind_ != ReductionKind::kProd) return;
  with_codec(type_, [&](auto codec) {
    using Stored = typename decltype(codec)::Stored;
    auto* const to = static_cast<std::byte*>(out);
    for (std::size_t at = 0; at + sizeof(Stored) <= bytes; at += sizeof(Stored)) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, to + at, sizeof(Stored));
      const Stored stored = contributed<decltype(codec)>(kind_, bits, mask);
      std::memcpy(to + at, &stored, sizeof stored);
    }
  });
}

Reduced::Reduced(ElementType type, ReductionKind kind, std::uint64_t sources, std::uint64_t step)
    : type_(type), kind_(kind) {
  for (std::uint64_t source = 0; source < sources; ++source) contributions_.emplace_back(type, source, step, kind);
}

void Reduced::produce(void* out, std::size_t bytes, std::uint64_t offset) const {
  std::byte one[kBlockBytes];
  auto* const to = static_cast<std::byte*>(out);
  const std::size_t sources = contributions_.size();
  for (std::size_t at = 0; at < bytes; at += kBlockBytes) {
    const std::size_t block = std::min(kBlockBytes, bytes - at);
    contributions_.front().produce(to + at, block, offset + at);  // rank 0 multiplies by 1
    for (std::size_t source = 1; source < sources; ++source) {
      contributions_[source].produce(one, block, offset + at);
      const bool last = source + 1 == sources;
      reduce_elements({.type = type_,
                       .kind = kind_,
                       .right_multiplier = kind_ == ReductionKind::kMulSum ? multiplier(source) : 1,
                       .divisor = kind_ == ReductionKind::kAvg && last ? static_cast<int>(sources) : 1},
                      to + at, to + at, one, block);
    }
  }
}

void reduce_elements(const Reduction& reduction, void* into, const void* left, const void* right, std::size_t bytes) {
  with_codec(reduction.type, [&](auto codec) {
    using Codec = decltype(codec);
    using Value = typename Codec::Value;
    const auto run = [&](const auto& combine) { for_each_element<Codec>(into, left, right, bytes, combine); };
    switch (reduction.kind) {
      case ReductionKind::kSum:
        return run([](Value a, Value b) { return add(a, b); });
      case ReductionKind::kProd:
        return run([](Value a, Value b) { return multiply(a, b); });
      case ReductionKind::kMax:
        return run([](Value a, Value b) { return std::max(a, b); });
      case ReductionKind::kMin:
        return run([](Value a, Value b) { return std::min(a, b); });
      case ReductionKind::kAvg:
        return run([&](Value a, Value b) { return divide(add(a, b), reduction.divisor); });
      case ReductionKind::kMulSum: {
        const auto of_left = static_cast<Value>(reduction.left_multiplier);
        const auto of_right = static_cast<Value>(reduction.right_multiplier);
        return run([&](Value a, Value b) { return add(multiply(a, of_left), multiply(b, of_right)); });
      }
    }
  });
}

}  // namespace verbatim::workload
