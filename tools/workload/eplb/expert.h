// The layout of one expert: the tensors that are moved together.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace verbatim::eplb {

// Invalid input. what() is one line that names the option, tensor, layer or row.
struct BadInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Tensor {
  std::string name;
  std::string type;   // "fp8", "bf16", ...
  std::size_t bytes;  // of one expert; a multiple of the type's size; may be 0
};

struct ExpertLayout {
  std::vector<Tensor> tensors;

  std::size_t bytes() const;
  // The offset of each tensor in a packed expert, which holds them one after the other.
  std::vector<std::size_t> offsets() const;
  // The indices of the tensors grouped by type. Types come in the order of their first appearance.
  std::vector<std::size_t> by_type() const;
};

// Bytes of one element. Throws BadInput for an unknown type.
std::size_t type_bytes(const std::string& type);

struct Preset {
  const char* name;
  ExpertLayout expert;
  std::size_t experts;    // logical experts
  std::size_t redundant;  // physical rows beyond one for each logical expert
  std::size_t layers;
};
const std::vector<Preset>& presets();
// Throws BadInput for an unknown name.
const Preset& find_preset(const std::string& name);

// Parses "name:type:bytes,...". `bytes` is the size in one expert, or with ":total" appended the size in `local_rows`
// experts together. Throws BadInput.
ExpertLayout parse_tensors(const std::string& text, std::size_t local_rows);

// Divides each tensor's bytes by `factor`, rounded down to whole elements. A tensor that is not empty keeps at least
// one.
ExpertLayout scaled(const ExpertLayout& expert, std::size_t factor);

}  // namespace verbatim::eplb
