// A family of cache blocks (KV, or the indexer's keys: LF) as one rank holds it, and the models whose families are
// known. Nothing here is shared between families: each has its own layers, blocks, lengths and addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace verbatim::kv {

enum class FamilyId : std::uint8_t { kKv = 0, kLf = 1 };

// What both ends of a transfer must agree on, apart from how many blocks each of them has and where.
struct Geometry {
  FamilyId family = FamilyId::kKv;
  std::string name = {};   // "kv", "lf"
  std::string dtype = {};  // for people and for the hash
  std::uint32_t layers = 0;
  std::uint32_t entries = 0;  // a layer: 2 where K and V are separate, else 1
  std::uint32_t block_tokens = 0;
  std::uint32_t heads = 0;        // on a prefill rank; 0: the block is not made of heads, every decode rank gets all
  std::uint32_t tp_ratio = 1;     // decode ranks that share what one prefill rank holds
  std::size_t prefill_bytes = 0;  // of one block of one layer and entry on a prefill rank

  // Of the part that one decode rank gets; also the length of its own blocks. Parts are runs of whole heads.
  std::size_t part_bytes() const { return heads == 0 ? prefill_bytes : prefill_bytes / tp_ratio; }
  // Where the part of the `index`-th decode rank begins in a prefill block.
  std::size_t part_offset(std::uint32_t index) const { return heads == 0 ? 0 : part_bytes() * index; }
  std::uint64_t hash() const;
  bool operator==(const Geometry&) const = default;
};

// One end of it. A layer's blocks lie one behind the other: all of entry 0, then all of entry 1.
struct Family {
  Geometry geometry = {};
  std::size_t num_blocks = 0;
  std::size_t block_len = 0;              // prefill_bytes or part_bytes
  std::vector<std::uint64_t> bases = {};  // addresses, one a layer

  std::size_t layer_bytes() const { return geometry.entries * num_blocks * block_len; }
  std::size_t bytes() const { return geometry.layers * layer_bytes(); }
  std::uint64_t address(std::uint32_t layer, std::uint32_t entry, std::uint32_t block) const {
    return bases[layer] + (std::uint64_t{entry} * num_blocks + block) * block_len;
  }
};

struct Model {
  std::string name;
  Geometry kv;
};

// Throws std::invalid_argument that lists the known names.
Model find_model(const std::string& name);
std::vector<std::string> model_names();
// The indexer's key cache of DeepSeek-V3.2, which stands for LF.
Geometry indexer_geometry();

// The same with 1/`scale` of the layers, at least one: messages keep their size, requests have fewer of them.
Geometry scaled(Geometry geometry, std::uint32_t scale);
// The same shared by `ratio` decode ranks. Throws std::invalid_argument when that would cut a head.
Geometry shared_by(Geometry geometry, std::uint32_t ratio);

}  // namespace verbatim::kv
