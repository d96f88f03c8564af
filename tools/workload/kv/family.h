// A family of cache blocks (KV, or the indexer's keys: LF) as one rank holds it, and the models with known families.
// Families share nothing: each has its own layers, blocks, lengths and addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace verbatim::kv {

enum class FamilyId : std::uint8_t { kKv = 0, kLf = 1 };

// What both ends of a transfer must agree on. The number of blocks and their addresses may differ between the ends.
struct Geometry {
  FamilyId family = FamilyId::kKv;
  std::string name = {};   // "kv", "lf"
  std::string dtype = {};  // only printed and part of the hash
  std::uint32_t layers = 0;
  std::uint32_t entries = 0;  // per layer: 2 where K and V are separate, else 1
  std::uint32_t block_tokens = 0;
  std::uint32_t heads = 0;        // on a prefill rank; 0: blocks are not divided by heads, each decode rank gets all
  std::uint32_t tp_ratio = 1;     // decode ranks that share what one prefill rank holds
  std::size_t prefill_bytes = 0;  // of one block of one layer and entry on a prefill rank

  // Bytes of one decode rank's part of a block, which is also the length of its own blocks. A part is a run of whole
  // heads.
  std::size_t part_bytes() const { return heads == 0 ? prefill_bytes : prefill_bytes / tp_ratio; }
  // The offset of the part of the `index`-th decode rank in a prefill block.
  std::size_t part_offset(std::uint32_t index) const { return heads == 0 ? 0 : part_bytes() * index; }
  std::uint64_t hash() const;
  bool operator==(const Geometry&) const = default;
};

// A family at one end of a transfer. The blocks of a layer are contiguous: all of entry 0, then all of entry 1.
struct Family {
  Geometry geometry = {};
  std::size_t num_blocks = 0;
  std::size_t block_len = 0;              // prefill_bytes or part_bytes
  std::vector<std::uint64_t> bases = {};  // start address of each layer

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

// Throws std::invalid_argument, which lists the known names, for an unknown name.
Model find_model(const std::string& name);
std::vector<std::string> model_names();
// The geometry of DeepSeek-V3.2's indexer key cache, used for LF.
Geometry indexer_geometry();

// Keeps 1/`scale` of the layers, at least one. Messages keep their size; requests have fewer of them.
Geometry scaled(Geometry geometry, std::uint32_t scale);
// Divides the heads among `ratio` decode ranks. Throws std::invalid_argument when the heads are not divisible.
Geometry shared_by(Geometry geometry, std::uint32_t ratio);

}  // namespace verbatim::kv
