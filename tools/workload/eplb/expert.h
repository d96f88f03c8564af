// What one expert consists of: the tensors that move together when it moves.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace verbatim::eplb {

// An input that makes no sense; what() is one line that names the place.
struct BadInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Tensor {
  std::string name;
  std::string type;   // "fp8", "bf16", ...
  std::size_t bytes;  // of one expert, a multiple of the type's size, may be 0
};

struct ExpertLayout {
  std::vector<Tensor> tensors;

  std::size_t bytes() const;
  // Where each tensor starts in a packed expert: one after the other, in their order.
  std::vector<std::size_t> offsets() const;
  // The tensors' indices with those of one type together, types in the order of their first appearance.
  std::vector<std::size_t> by_type() const;
};

// Bytes of an element. Throws BadInput.
std::size_t type_bytes(const std::string& type);

struct Preset {
  const char* name;
  ExpertLayout expert;
  std::size_t experts;    // logical ones
  std::size_t redundant;  // rows beyond one for each
  std::size_t layers;
};
const std::vector<Preset>& presets();
// Throws BadInput.
const Preset& find_preset(const std::string& name);

// "name:type:bytes,...": bytes of one expert, or, with ":total" behind them, of `local_rows` experts together. Throws
// BadInput.
ExpertLayout parse_tensors(const std::string& text, std::size_t local_rows);

// Every tensor's bytes divided by `factor`, rounded down to whole elements, but at least one where there was one.
ExpertLayout scaled(const ExpertLayout& expert, std::size_t factor);

}  // namespace verbatim::eplb
