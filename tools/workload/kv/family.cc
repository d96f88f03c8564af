#include "workload/kv/family.h"

#include <algorithm>
#include <stdexcept>

namespace verbatim::kv {
namespace {

constexpr std::uint64_t kFnvOffset = 0xcbf29ce484222325;
constexpr std::uint64_t kFnvPrime = 0x100000001b3;

struct Hash {
  std::uint64_t value = kFnvOffset;

  void add(std::uint8_t byte) { value = (value ^ byte) * kFnvPrime; }
  void add(std::uint64_t word) {
    for (int i = 0; i < 8; ++i) add(static_cast<std::uint8_t>(word >> (8 * i)));
  }
  void add(const std::string& text) {
    for (const char c : text) add(static_cast<std::uint8_t>(c));
    add(std::uint64_t{text.size()});
  }
};

Model llama_70b(std::uint32_t tp) {
  constexpr std::uint32_t kHeads = 8;
  constexpr std::uint32_t kHeadDim = 128;
  constexpr std::uint32_t kBlockTokens = 16;
  const std::uint32_t heads = kHeads / tp;
  return {"llama-70b-tp" + std::to_string(tp),
          {.name = "kv",
           .dtype = "bf16",
           .layers = 80,
           .entries = 2,
           .block_tokens = kBlockTokens,
           .heads = heads,
           .prefill_bytes = std::size_t{kBlockTokens} * heads * kHeadDim * 2}};
}

Model deepseek_mla(const std::string& name, const std::string& dtype, std::size_t token_bytes) {
  constexpr std::uint32_t kBlockTokens = 64;
  return {name,
          {.name = "kv",
           .dtype = dtype,
           .layers = 61,
           .entries = 1,
           .block_tokens = kBlockTokens,
           .prefill_bytes = kBlockTokens * token_bytes}};
}

const std::vector<Model>& models() {
  static const std::vector<Model> all{llama_70b(1),
                                      llama_70b(2),
                                      llama_70b(4),
                                      llama_70b(8),
                                      deepseek_mla("deepseek-mla-bf16", "bf16", std::size_t{576} * 2),
                                      deepseek_mla("deepseek-mla-fp8", "fp8_ds_mla", 656)};
  return all;
}

}  // namespace

std::uint64_t Geometry::hash() const {
  Hash hash;
  hash.add(static_cast<std::uint8_t>(family));
  hash.add(name);
  hash.add(dtype);
  for (const std::uint32_t number : {layers, entries, block_tokens, heads, tp_ratio}) hash.add(std::uint64_t{number});
  hash.add(std::uint64_t{prefill_bytes});
  return hash.value;
}

Model find_model(const std::string& name) {
  std::string known;
  for (const Model& model : models()) {
    if (model.name == name) return model;
    known += (known.empty() ? "" : ", ") + model.name;
  }
  throw std::invalid_argument("unknown preset '" + name + "'; known presets: " + known);
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Model& model : models()) names.push_back(model.name);
  return names;
}

Geometry indexer_geometry() {
  constexpr std::uint32_t kBlockTokens = 64;
  return {.family = FamilyId::kLf,
          .name = "lf",
          .dtype = "uint8",
          .layers = 61,
          .entries = 1,
          .block_tokens = kBlockTokens,
          .prefill_bytes = std::size_t{kBlockTokens} * 132};
}

Geometry scaled(Geometry geometry, std::uint32_t scale) {
  geometry.layers = std::max(1U, (geometry.layers + scale - 1) / scale);
  return geometry;
}

Geometry shared_by(Geometry geometry, std::uint32_t ratio) {
  if (geometry.heads != 0 && geometry.heads % ratio != 0) {
    throw std::invalid_argument("a TP ratio of " + std::to_string(ratio) + " would cut the " +
                                std::to_string(geometry.heads) + " KV head(s) of a prefill rank");
  }
  geometry.tp_ratio = ratio;
  return geometry;
}

}  // namespace verbatim::kv
