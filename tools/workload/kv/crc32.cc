#include "workload/kv/crc32.h"

#include <array>
#include <cstring>

namespace verbatim::kv {
namespace {

constexpr std::uint32_t kPolynomial = 0xedb88320;
constexpr std::size_t kSlices = 8;  // bytes processed in one iteration: one 64-bit word
using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < kSlices; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

void Crc32::add(const void* data, std::size_t bytes) {
  const auto* at = static_cast<const std::uint8_t*>(data);
  std::uint32_t crc = state_;
  for (; bytes >= kSlices; bytes -= kSlices, at += kSlices) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, sizeof word);
    word ^= crc;
    crc = 0;
    for (std::size_t slice = 0; slice < kSlices; ++slice) {
      crc ^= kTables[kSlices - 1 - slice][(word >> (8 * slice)) & 0xff];
    }
  }
  for (; bytes > 0; --bytes, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xff];
  state_ = crc;
}

}  // namespace verbatim::kv
