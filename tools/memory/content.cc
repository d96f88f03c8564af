#include "memory/content.h"

#include <algorithm>
#include <vector>

namespace verbatim::memory {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{1} << 20;  // a multiple of every unit that verify() accepts

// Calls `act` with a block of host memory and its offset in the data, for the whole data.
template <typename Act>
void in_blocks(std::size_t bytes, const Act& act) {
  std::vector<std::byte> block(std::min(bytes, kBlockBytes));
  for (std::size_t at = 0; at < bytes; at += kBlockBytes) act(block.data(), at, std::min(kBlockBytes, bytes - at));
}

}  // namespace

void fill(Memory& memory, const workload::Content& content, std::byte* data, std::size_t bytes, std::uint64_t offset) {
  if (memory.is_host()) return workload::fill(content, data, bytes, offset);
  in_blocks(bytes, [&](std::byte* block, std::size_t at, std::size_t size) {
    workload::fill(content, block, size, offset + at);
    memory.upload(data + at, block, size);
  });
}

void poison(Memory& memory, const workload::Content& expected, std::byte* data, std::size_t bytes,
            std::uint64_t offset) {
  if (memory.is_host()) return workload::poison(expected, data, bytes, offset);
  in_blocks(bytes, [&](std::byte* block, std::size_t at, std::size_t size) {
    workload::poison(expected, block, size, offset + at);
    memory.upload(data + at, block, size);
  });
}

workload::Mismatch verify(Memory& memory, const workload::Content& expected, const std::byte* data, std::size_t bytes,
                          std::uint64_t offset, std::size_t unit) {
  if (memory.is_host()) return workload::verify(expected, data, bytes, offset, unit);
  workload::Mismatch all;
  in_blocks(bytes, [&](std::byte* block, std::size_t at, std::size_t size) {
    memory.download(block, data + at, size);
    const workload::Mismatch found = workload::verify(expected, block, size, offset + at, unit);
    const std::uint64_t before = all.wrong;
    if (before == 0 && found.wrong > 0) all = {0, at + found.first_offset, found.expected, found.got};
    all.wrong = before + found.wrong;
  });
  return all;
}

}  // namespace verbatim::memory
