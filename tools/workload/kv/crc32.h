// CRC-32 (the polynomial of Ethernet and zip) of data that is added in parts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbatim::kv {

class Crc32 {
 public:
  void add(const void* data, std::size_t bytes);
  std::uint32_t value() const { return ~state_; }

 private:
  std::uint32_t state_ = ~std::uint32_t{0};
};

}  // namespace verbatim::kv
