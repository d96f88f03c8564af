#include "workload/eplb/expert.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>

namespace verbatim::eplb {
namespace {

constexpr std::size_t kMaxTensorBytes = std::size_t{1} << 40;

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == at) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::size_t parse_count(const std::string& text, const std::string& where) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value > kMaxTensorBytes) {
    throw BadInput(where + ": not a number of bytes: '" + text + "'");
  }
  return value;
}

}  // namespace

std::size_t ExpertLayout::bytes() const {
  return std::accumulate(tensors.begin(), tensors.end(), std::size_t{0},
                         [](std::size_t sum, const Tensor& tensor) { return sum + tensor.bytes; });
}

std::vector<std::size_t> ExpertLayout::offsets() const {
  std::vector<std::size_t> offsets;
  std::size_t at = 0;
  for (const Tensor& tensor : tensors) {
    offsets.push_back(at);
    at += tensor.bytes;
  }
  return offsets;
}

std::vector<std::size_t> ExpertLayout::by_type() const {
  std::vector<std::string> types;
  for (const Tensor& tensor : tensors) {
    if (std::find(types.begin(), types.end(), tensor.type) == types.end()) types.push_back(tensor.type);
  }
  std::vector<std::size_t> order;
  for (const std::string& type : types) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].type == type) order.push_back(i);
    }
  }
  return order;
}

std::size_t type_bytes(const std::string& type) {
  static const std::map<std::string, std::size_t> kTypes{{"uint8", 1}, {"int8", 1}, {"fp8", 1},  {"fp4x2", 1},
                                                         {"bf16", 2},  {"fp16", 2}, {"fp32", 4}, {"int32", 4},
                                                         {"int64", 8}, {"fp64", 8}};
  const auto found = kTypes.find(type);
  if (found == kTypes.end()) throw BadInput("unknown tensor type: '" + type + "'");
  return found->second;
}

// DeepSeek-V3's experts: hidden size 7,168, intermediate size 2,048; w13 is gate and up projection in one.
const std::vector<Preset>& presets() {
  static const std::vector<Preset> all{
      {"dsv3-fp8",
       {{{"w13", "fp8", 29'360'128},
         {"w2", "fp8", 14'680'064},
         {"w13_scale", "fp32", 7168},
         {"w2_scale", "fp32", 3584}}},
       256,
       32,
       58},
      {"dsv3-bf16", {{{"w13", "bf16", 58'720'256}, {"w2", "bf16", 29'360'128}}}, 256, 32, 58},
      {"dsv3-nvfp4",
       {{{"w13", "fp4x2", 14'680'064},
         {"w2", "fp4x2", 7'340'032},
         {"w13_scale", "fp8", 1'835'008},
         {"w2_scale", "fp8", 917'504},
         {"w13_scale_2", "fp32", 8},
         {"w2_scale_2", "fp32", 4}}},
       256,
       32,
       58},
      // Odd sizes, an empty tensor, and types that alternate.
      {"tiny-mixed",
       {{{"w13", "fp8", 4097},
         {"w13_scale", "fp32", 12},
         {"w2", "fp8", 1},
         {"bias", "bf16", 1030},
         {"none", "uint8", 0},
         {"w2_scale", "fp32", 4}}},
       24,
       8,
       4},
  };
  return all;
}

const Preset& find_preset(const std::string& name) {
  std::string names;
  for (const Preset& preset : presets()) {
    if (preset.name == name) return preset;
    names += std::string(names.empty() ? "" : ", ") + preset.name;
  }
  throw BadInput("unknown preset: '" + name + "'; known presets: " + names);
}

ExpertLayout parse_tensors(const std::string& text, std::size_t local_rows) {
  ExpertLayout expert;
  for (const std::string& one : split(text, ',')) {
    const std::vector<std::string> fields = split(one, ':');
    const std::string where = "tensor '" + one + "'";
    const bool total = fields.size() == 4 && fields[3] == "total";
    if ((fields.size() != 3 && !total) || fields[0].empty()) throw BadInput(where + ": not name:type:bytes[:total]");
    std::size_t bytes = parse_count(fields[2], where);
    if (total) {
      if (bytes % local_rows != 0) {
        throw BadInput("tensor " + fields[0] + ": " + std::to_string(bytes) + " bytes are not divisible by " +
                       std::to_string(local_rows) + " rows");
      }
      bytes /= local_rows;
    }
    if (bytes % type_bytes(fields[1]) != 0) {
      throw BadInput("tensor " + fields[0] + ": " + std::to_string(bytes) +
                     " bytes per expert are not a multiple of the size of " + fields[1]);
    }
    expert.tensors.push_back({fields[0], fields[1], bytes});
  }
  return expert;
}

ExpertLayout scaled(const ExpertLayout& expert, std::size_t factor) {
  ExpertLayout smaller = expert;
  for (Tensor& tensor : smaller.tensors) {
    const std::size_t element = type_bytes(tensor.type);
    if (tensor.bytes > 0) tensor.bytes = std::max<std::size_t>(1, tensor.bytes / element / factor) * element;
  }
  return smaller;
}

}  // namespace verbatim::eplb
