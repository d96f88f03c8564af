#include "verbatim-kv/cache.h"

#include <cstdio>

#include "memory/content.h"

namespace verbatim::kv {
namespace {

// A source number that no request has. Each family adds its own number.
constexpr std::uint64_t kCanarySource = ~std::uint64_t{0} - 16;

}  // namespace

CacheMemory::CacheMemory(memory::Memory& memory, std::vector<Family>& families, Allocations allocations) {
  std::size_t layers = 0;
  std::size_t all_bytes = 0;
  for (Family& family : families) {
    layers = std::max<std::size_t>(layers, family.geometry.layers);
    all_bytes += family.bytes();
    family.bases.clear();
  }
  std::uint64_t next = 0;
  const auto allocate = [&](std::size_t bytes) {
    buffers_.push_back(std::make_unique<memory::GuardedBuffer>(memory, bytes));
    next = reinterpret_cast<std::uint64_t>(buffers_.back()->data());
  };
  const auto place_layer = [&](Family& family) {
    if (allocations == Allocations::kLayer) allocate(family.layer_bytes());
    family.bases.push_back(next);
    intervals_.add(next, family.layer_bytes());
    next += family.layer_bytes();
  };
  if (allocations == Allocations::kSlab) {
    allocate(all_bytes);
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      for (Family& family : families) {
        if (layer < family.geometry.layers) place_layer(family);
      }
    }
    return;
  }
  for (Family& family : families) {
    if (allocations == Allocations::kFamily) allocate(family.bytes());
    for (std::uint32_t layer = 0; layer < family.geometry.layers; ++layer) place_layer(family);
  }
}

std::uint64_t CacheMemory::damage() const {
  std::uint64_t bytes = 0;
  for (const auto& buffer : buffers_) {
    if (const auto damage = buffer->damage()) bytes += damage->bytes;
  }
  return bytes;
}

// Calls `visit` for every block of every layer and entry, in the order of the messages.
template <typename Visit>
void Contents::each(std::span<const std::uint32_t> blocks, Visit visit) const {
  const Geometry& geometry = family_.geometry;
  timed([&] {
    for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
      for (std::uint32_t entry = 0; entry < geometry.entries; ++entry) {
        for (std::uint32_t position = 0; position < blocks.size(); ++position) {
          visit(MessagePosition{layer, entry, position},
                reinterpret_cast<std::byte*>(family_.address(layer, entry, blocks[position])));
        }
      }
    }
  });
}

workload::Pattern Contents::canary(std::uint32_t layer, std::uint32_t entry, std::uint32_t block) const {
  const Geometry& geometry = family_.geometry;
  return {kCanarySource + static_cast<std::uint64_t>(geometry.family),
          (std::uint64_t{layer} * geometry.entries + entry) * family_.num_blocks + block};
}

workload::Pattern Contents::content(const BlockShare& share, const MessagePosition& place) const {
  const Geometry& geometry = family_.geometry;
  const std::uint64_t plane = std::uint64_t{place.layer} * geometry.entries + place.entry;
  return {std::uint64_t{share.request} * 2 + static_cast<std::uint64_t>(geometry.family),
          plane << 32 | (share.first + place.position)};
}

void Contents::set_canaries(std::span<const std::uint32_t> blocks) const {
  each(blocks, [&](const MessagePosition& place, std::byte* at) {
    memory::fill(memory_, canary(place.layer, place.entry, blocks[place.position]), at, family_.block_len);
  });
}

void Contents::fill(const BlockShare& share) const {
  each(share.blocks, [&](const MessagePosition& place, std::byte* at) {
    memory::fill(memory_, content(share, place), at, family_.block_len, share.part_offset);
  });
}

void Contents::poison(const BlockShare& share) const {
  each(share.blocks, [&](const MessagePosition& place, std::byte* at) {
    memory::poison(memory_, content(share, place), at, family_.block_len, share.part_offset);
  });
}

std::uint64_t Contents::check_canaries(std::span<const std::uint32_t> blocks, std::string& where) const {
  std::uint64_t wrong = 0;
  each(blocks, [&](const MessagePosition& place, const std::byte* at) {
    const std::uint32_t block = blocks[place.position];
    const auto found = memory::verify(memory_, canary(place.layer, place.entry, block), at, family_.block_len);
    if (found.wrong > 0 && wrong == 0) where = "a free block was written: " + describe(place, block, found);
    wrong += found.wrong;
  });
  return wrong;
}

std::uint64_t Contents::check(const BlockShare& share, std::string& where) const {
  std::uint64_t wrong = 0;
  each(share.blocks, [&](const MessagePosition& place, const std::byte* at) {
    const auto found = memory::verify(memory_, content(share, place), at, family_.block_len, share.part_offset);
    if (found.wrong > 0 && wrong == 0) {
      where = "request " + std::to_string(share.request) + ": " + describe(place, share.blocks[place.position], found);
    }
    wrong += found.wrong;
  });
  return wrong;
}

std::string Contents::describe(const MessagePosition& place, std::uint32_t block,
                               const workload::Mismatch& found) const {
  char text[200];
  std::snprintf(text, sizeof text,
                "family %s, layer %u, entry %u, block %u: %llu wrong bytes, first at byte %llu: %02x instead of %02x",
                family_.geometry.name.c_str(), place.layer, place.entry, block,
                static_cast<unsigned long long>(found.wrong), static_cast<unsigned long long>(found.first_offset),
                found.got, found.expected);
  return text;
}

}  // namespace verbatim::kv
