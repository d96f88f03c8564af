#include "workload/kv/validation.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>

namespace verbatim::kv {
namespace {

__attribute__((format(printf, 2, 3))) Rejection reject(RejectionCode code, const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return {code, text};
}

// Bytes of one layer; nothing when they overflow 64 bits.
std::optional<std::uint64_t> layer_bytes(const Family& family) {
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(std::uint64_t{family.geometry.entries}, std::uint64_t{family.num_blocks}, &bytes) ||
      __builtin_mul_overflow(bytes, std::uint64_t{family.block_len}, &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

// Rejects a list whose layers do not start at the family's addresses or whose blocks have another length.
std::optional<Rejection> check_bases(const RegisteredFamily& side, const BlockList& list) {
  const Family& family = side.family;
  const char* const name = family.geometry.name.c_str();
  if (list.bases.size() != family.bases.size()) {
    return reject(RejectionCode::kGeometryMismatch, "%zu layers; family %s has %zu", list.bases.size(), name,
                  family.bases.size());
  }
  for (std::size_t layer = 0; layer < list.bases.size(); ++layer) {
    const std::uint64_t base = list.bases[layer];
    if (base == family.bases[layer]) continue;
    return reject(RejectionCode::kUnregistered,
                  "layer %zu starts at 0x%" PRIx64 "; family %s has registered it at 0x%" PRIx64, layer, base, name,
                  family.bases[layer]);
  }
  if (list.block_len != family.block_len) {
    return reject(RejectionCode::kBaseConflict,
                  "blocks of %" PRIu64 " bytes at 0x%" PRIx64
                  "; family %s is registered there with blocks of %zu bytes",
                  list.block_len, list.bases.empty() ? 0 : list.bases[0], name, family.block_len);
  }
  return std::nullopt;
}

}  // namespace

const char* rejection_name(RejectionCode code) {
  switch (code) {
    case RejectionCode::kWrongFamily:
      return "wrong-family";
    case RejectionCode::kGeometryMismatch:
      return "geometry-mismatch";
    case RejectionCode::kCountMismatch:
      return "count-mismatch";
    case RejectionCode::kLengthMismatch:
      return "length-mismatch";
    case RejectionCode::kBaseConflict:
      return "base-conflict";
    case RejectionCode::kUnregistered:
      return "unregistered";
    case RejectionCode::kIndexOutOfRange:
      return "index-out-of-range";
    case RejectionCode::kOverlappingDestination:
      return "overlapping-destination";
  }
  return "?";
}

BlockList make_list(const Family& family, std::vector<std::uint32_t> blocks) {
  return {.family = family.geometry.family,
          .geometry_hash = family.geometry.hash(),
          .piece_bytes = family.geometry.part_bytes(),
          .block_len = family.block_len,
          .bases = family.bases,
          .blocks = std::move(blocks)};
}

std::optional<Rejection> validate_family(const RegisteredFamily& side) {
  const Family& family = side.family;
  const char* const name = family.geometry.name.c_str();
  const auto bytes = layer_bytes(family);
  if (!bytes) {
    return reject(RejectionCode::kGeometryMismatch, "family %s: %" PRIu32 " * %zu blocks of %zu bytes overflow", name,
                  family.geometry.entries, family.num_blocks, family.block_len);
  }
  if (family.bases.size() != family.geometry.layers) {
    return reject(RejectionCode::kGeometryMismatch, "family %s has %" PRIu32 " layers and %zu addresses", name,
                  family.geometry.layers, family.bases.size());
  }
  if (family.block_len != family.geometry.part_bytes() && family.block_len != family.geometry.prefill_bytes) {
    return reject(RejectionCode::kGeometryMismatch, "family %s: blocks of %zu bytes instead of %zu or %zu", name,
                  family.block_len, family.geometry.prefill_bytes, family.geometry.part_bytes());
  }
  for (std::size_t layer = 0; layer < family.bases.size(); ++layer) {
    if (side.memory.find(family.bases[layer], *bytes)) continue;
    return reject(RejectionCode::kUnregistered,
                  "family %s, layer %zu: %" PRIu64 " bytes at 0x%" PRIx64 " are not within one registration", name,
                  layer, *bytes, family.bases[layer]);
  }
  return std::nullopt;
}

std::optional<Rejection> validate_list(const RegisteredFamily& side, const BlockList& list, std::size_t count) {
  const Family& family = side.family;
  const char* const name = family.geometry.name.c_str();
  if (list.family != family.geometry.family) {
    return reject(RejectionCode::kWrongFamily, "the handle is of family %u, the transfer of family %u (%s)",
                  static_cast<unsigned>(list.family), static_cast<unsigned>(family.geometry.family), name);
  }
  if (list.geometry_hash != side.geometry_hash) {
    return reject(RejectionCode::kGeometryMismatch,
                  "the handle is for geometry %016" PRIx64 "; family %s has %016" PRIx64, list.geometry_hash, name,
                  side.geometry_hash);
  }
  if (list.blocks.size() != count || count == 0) {
    return reject(RejectionCode::kCountMismatch, "%zu blocks in the list instead of %zu", list.blocks.size(), count);
  }
  if (list.piece_bytes != family.geometry.part_bytes()) {
    return reject(RejectionCode::kLengthMismatch, "messages of %" PRIu64 " bytes; family %s has messages of %zu bytes",
                  list.piece_bytes, name, family.geometry.part_bytes());
  }
  if (auto rejection = check_bases(side, list)) return rejection;
  const auto beyond =
      std::find_if(list.blocks.begin(), list.blocks.end(), [&](auto block) { return block >= family.num_blocks; });
  if (beyond != list.blocks.end()) {
    return reject(RejectionCode::kIndexOutOfRange, "block %" PRIu32 " at position %td; family %s has %zu blocks",
                  *beyond, beyond - list.blocks.begin(), name, family.num_blocks);
  }
  return std::nullopt;
}

std::optional<Rejection> validate_pair(const BlockList& source, const BlockList& destination) {
  if (source.family != destination.family) {
    return reject(RejectionCode::kWrongFamily, "from family %u to family %u", static_cast<unsigned>(source.family),
                  static_cast<unsigned>(destination.family));
  }
  if (source.geometry_hash != destination.geometry_hash) {
    return reject(RejectionCode::kGeometryMismatch, "from geometry %016" PRIx64 " to geometry %016" PRIx64,
                  source.geometry_hash, destination.geometry_hash);
  }
  if (source.blocks.size() != destination.blocks.size()) {
    return reject(RejectionCode::kCountMismatch, "%zu source blocks, %zu destination blocks", source.blocks.size(),
                  destination.blocks.size());
  }
  if (source.piece_bytes != destination.piece_bytes) {
    return reject(RejectionCode::kLengthMismatch,
                  "source messages of %" PRIu64 " bytes, destination messages of %" PRIu64, source.piece_bytes,
                  destination.piece_bytes);
  }
  return std::nullopt;
}

std::optional<Rejection> BlockReservations::reserve(std::uint32_t request, std::span<const std::uint32_t> blocks) {
  const std::uint64_t holder = std::uint64_t{request} + 1;
  for (std::size_t position = 0; position < blocks.size(); ++position) {
    const std::uint32_t block = blocks[position];
    if (block < holders_.size() && holders_[block] == 0) {
      holders_[block] = holder;
      continue;
    }
    release(blocks.first(position));
    if (block >= holders_.size()) {
      return reject(RejectionCode::kIndexOutOfRange, "block %" PRIu32 " at position %zu; there are %zu blocks", block,
                    position, holders_.size());
    }
    const auto first = std::find(blocks.begin(), blocks.end(), block) - blocks.begin();
    if (static_cast<std::size_t>(first) < position) {
      return reject(RejectionCode::kOverlappingDestination,
                    "block %" PRIu32 " at position %td and again at position %zu", block, first, position);
    }
    return reject(RejectionCode::kOverlappingDestination,
                  "block %" PRIu32 " at position %zu belongs to request %" PRIu64, block, position,
                  holders_[block] - 1);
  }
  return std::nullopt;
}

void BlockReservations::release(std::span<const std::uint32_t> blocks) {
  for (const std::uint32_t block : blocks) holders_[block] = 0;
}

}  // namespace verbatim::kv
