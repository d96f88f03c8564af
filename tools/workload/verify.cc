#include "workload/verify.h"

#include <algorithm>
#include <cstring>

namespace verbatim::workload {
namespace {

constexpr std::size_t kVerifyBlockBytes = 4096;

// Adds the mismatches of one block to `found`. The block starts `start` bytes into the data.
void compare_block(const std::uint8_t* expected, const std::uint8_t* got, std::size_t bytes, std::uint64_t start,
                   std::size_t unit, Mismatch& found) {
  for (std::size_t at = 0; at < bytes; at += unit) {
    const std::size_t part = std::min(unit, bytes - at);
    if (std::memcmp(expected + at, got + at, part) == 0) continue;
    if (found.wrong++ > 0) continue;
    std::size_t byte = at;
    while (expected[byte] == got[byte]) ++byte;
    found.first_offset = start + byte;
    found.expected = expected[byte];
    found.got = got[byte];
  }
}

}  // namespace

void poison(const Content& expected, void* data, std::size_t bytes, std::uint64_t offset) {
  expected.produce(data, bytes, offset);
  auto* const to = static_cast<std::uint8_t*>(data);
  for (std::size_t at = 0; at < bytes; ++at) to[at] = static_cast<std::uint8_t>(~to[at]);
}

Mismatch verify(const Content& expected, const void* data, std::size_t bytes, std::uint64_t offset, std::size_t unit) {
  std::uint8_t block[kVerifyBlockBytes];
  const auto* const got = static_cast<const std::uint8_t*>(data);
  Mismatch found;
  for (std::size_t at = 0; at < bytes; at += kVerifyBlockBytes) {
    const std::size_t part = std::min(kVerifyBlockBytes, bytes - at);
    expected.produce(block, part, offset + at);
    if (std::memcmp(block, got + at, part) != 0) compare_block(block, got + at, part, at, unit, found);
  }
  return found;
}

}  // namespace verbatim::workload
