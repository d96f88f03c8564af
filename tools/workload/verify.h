// Fills buffers with content, poisons them, and finds wrong bytes in them afterwards.
#pragma once

#include <cstddef>
#include <cstdint>

#include "workload/content.h"

namespace verbatim::workload {

struct Mismatch {
  std::uint64_t wrong = 0;         // units (bytes by default) with at least one wrong byte
  std::uint64_t first_offset = 0;  // of the first wrong byte, from the start of the data; meaningful if wrong > 0
  std::uint8_t expected = 0;
  std::uint8_t got = 0;
};

inline void fill(const Content& content, void* data, std::size_t bytes, std::uint64_t offset = 0) {
  content.produce(data, bytes, offset);
}

// Makes every byte differ from the content that is expected there, so that a byte that was not written is always found.
void poison(const Content& expected, void* data, std::size_t bytes, std::uint64_t offset = 0);

// Compares `bytes` at `data` with the content from `offset` on. `unit` is the size of what Mismatch::wrong counts; it
// must divide 4,096.
Mismatch verify(const Content& expected, const void* data, std::size_t bytes, std::uint64_t offset = 0,
                std::size_t unit = 1);

}  // namespace verbatim::workload
