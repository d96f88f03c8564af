#include "workload/content.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace verbatim::workload {
namespace {

static_assert(std::endian::native == std::endian::little, "patterns are defined as little-endian words");

constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
constexpr std::size_t kBlockBytes = 4096;
constexpr std::uint64_t kWeyl = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: neighbours differ in half of their bits
constexpr std::uint64_t kFloatMask = 0xffff;

// The finaliser of splitmix64. It is a bijection: different inputs give different words.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

template <typename T>
void add(void* into, const void* left, const void* right, std::size_t bytes) {
  auto* const to = static_cast<std::byte*>(into);
  const auto* const l = static_cast<const std::byte*>(left);
  const auto* const r = static_cast<const std::byte*>(right);
  for (std::size_t at = 0; at + sizeof(T) <= bytes; at += sizeof(T)) {
    T a;
    T b;
    std::memcpy(&a, l + at, sizeof a);
    std::memcpy(&b, r + at, sizeof b);
    const T sum = static_cast<T>(a + b);
    std::memcpy(to + at, &sum, sizeof sum);
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
  switch (type) {
    case ElementType::kInt8:
    case ElementType::kUint8:
      return 1;
    case ElementType::kInt32:
    case ElementType::kUint32:
    case ElementType::kFloat:
      return 4;
    case ElementType::kInt64:
    case ElementType::kUint64:
      return 8;
  }
  return 1;
}

const char* element_name(ElementType type) {
  switch (type) {
    case ElementType::kInt8:
      return "int8";
    case ElementType::kUint8:
      return "uint8";
    case ElementType::kInt32:
      return "int32";
    case ElementType::kUint32:
      return "uint32";
    case ElementType::kInt64:
      return "int64";
    case ElementType::kUint64:
      return "uint64";
    case ElementType::kFloat:
      return "float";
  }
  return "?";
}

Elements::Elements(ElementType type, std::uint64_t source, std::uint64_t step) : type_(type), pattern_(source, step) {}

void Elements::produce(void* out, std::size_t bytes, std::uint64_t offset) const {
  pattern_.produce(out, bytes, offset);
  if (type_ != ElementType::kFloat) return;
  auto* const to = static_cast<std::byte*>(out);
  for (std::size_t at = 0; at + sizeof(float) <= bytes; at += sizeof(float)) {
    std::uint32_t bits;
    std::memcpy(&bits, to + at, sizeof bits);
    const auto value = static_cast<float>(bits & kFloatMask);
    std::memcpy(to + at, &value, sizeof value);
  }
}

Sum::Sum(ElementType type, std::uint64_t sources, std::uint64_t step) : type_(type) {
  for (std::uint64_t source = 0; source < sources; ++source) contributions_.emplace_back(type, source, step);
}

void Sum::produce(void* out, std::size_t bytes, std::uint64_t offset) const {
  std::byte one[kBlockBytes];
  auto* const to = static_cast<std::byte*>(out);
  for (std::size_t at = 0; at < bytes; at += kBlockBytes) {
    const std::size_t block = std::min(kBlockBytes, bytes - at);
    std::memset(to + at, 0, block);
    for (const Elements& contribution : contributions_) {
      contribution.produce(one, block, offset + at);
      add_elements(type_, to + at, to + at, one, block);
    }
  }
}

void add_elements(ElementType type, void* into, const void* left, const void* right, std::size_t bytes) {
  switch (type) {  // two's complement: the unsigned sum has the same bits as the signed one
    case ElementType::kInt8:
    case ElementType::kUint8:
      return add<std::uint8_t>(into, left, right, bytes);
    case ElementType::kInt32:
    case ElementType::kUint32:
      return add<std::uint32_t>(into, left, right, bytes);
    case ElementType::kInt64:
    case ElementType::kUint64:
      return add<std::uint64_t>(into, left, right, bytes);
    case ElementType::kFloat:
      return add<float>(into, left, right, bytes);
  }
}

}  // namespace verbatim::workload
