#include "verbatim-eplb/input.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

namespace verbatim::eplb {
namespace {

constexpr const char* kTrace = "trace=";
// Bounds the tables that are indexed by expert number.
constexpr int kMostExperts = 1'000'000;

std::vector<int> rows_of(const nlohmann::json& line, const char* key, const std::string& where) {
  if (!line.contains(key) || !line[key].is_array()) throw BadInput(where + ": there is no list '" + key + "'");
  std::vector<int> rows;
  for (const nlohmann::json& row : line[key]) {
    const bool fits = row.is_number_integer() && row >= -kMostExperts && row < kMostExperts;
    if (!fits) {
      throw BadInput(where + ", " + key + ", row " + std::to_string(rows.size()) +
                     ": not an expert number: " + row.dump());
    }
    rows.push_back(row.get<int>());
  }
  return rows;
}

// A trace may contain the bytes of each row, so that a trace recorded for another expert is rejected.
void check_sizes(const nlohmann::json& line, std::size_t expert_bytes, const std::string& where) {
  if (!line.contains("bytes")) return;
  const std::size_t rows = line["old"].size();
  if (!line["bytes"].is_array() || line["bytes"].size() != rows) {
    throw BadInput(where + ": 'bytes' is not a list of " + std::to_string(rows) + " sizes");
  }
  std::size_t row = 0;
  for (const nlohmann::json& bytes : line["bytes"]) {
    if (!bytes.is_number_unsigned() || bytes != expert_bytes) {
      throw BadInput(where + ", row " + std::to_string(row) + ": " + bytes.dump() + " bytes instead of " +
                     std::to_string(expert_bytes));
    }
    ++row;
  }
}

struct Trace {
  std::vector<Layer> layers;
  int largest = kEmptyRow;
};

Trace read_trace(const std::string& path, std::size_t expert_bytes) {
  std::ifstream file(path);
  if (!file) throw BadInput(path + ": cannot be read");
  Trace trace;
  std::string text;
  for (std::size_t number = 1; std::getline(file, text); ++number) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    std::string where = path + ", line " + std::to_string(number);
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
    if (!line.is_object()) throw BadInput(where + ": not a JSON object");
    Layer layer{trace.layers.size(), rows_of(line, "old", where), rows_of(line, "new", where)};
    if (line.contains("layer")) {
      if (!line["layer"].is_number_unsigned()) throw BadInput(where + ": 'layer' is not a number");
      layer.number = line["layer"].get<std::size_t>();
    }
    if (expert_bytes > 0) check_sizes(line, expert_bytes, where);
    for (const auto* rows : {&layer.before, &layer.after}) {
      for (const int expert : *rows) trace.largest = std::max(trace.largest, expert);
    }
    trace.layers.push_back(std::move(layer));
  }
  if (trace.layers.empty()) throw BadInput(path + ": no layers");
  return trace;
}

Policy find_policy(const std::string& name) {
  std::string names;
  for (const auto& [known, policy] : policies()) {
    if (known == name) return policy;
    names += known + ", ";
  }
  throw BadInput("unknown policy: '" + name + "'; known policies: " + names + "all, trace=FILE");
}

std::vector<Policy> find_policies(const std::string& list) {
  std::vector<Policy> found;
  if (list == "all") {
    for (const auto& [name, policy] : policies()) found.push_back(policy);
    return found;
  }
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) found.push_back(find_policy(name));
  if (found.empty()) throw BadInput("--policy needs at least one name");
  return found;
}

}  // namespace

Input make_input(const Options& options) {
  const Preset& preset = find_preset(options.preset);
  const auto ranks = static_cast<std::size_t>(options.job.size());
  const std::size_t experts = options.experts > 0 ? options.experts : preset.experts;
  const bool traced = options.policy.starts_with(kTrace);
  const auto expert_of = [&](std::size_t local_rows) {
    const ExpertLayout full =
        options.tensors.empty() ? preset.expert : parse_tensors(options.tensors, std::max<std::size_t>(1, local_rows));
    return scaled(full, options.scale);
  };
  Input input;
  if (traced) {
    const std::string path = options.policy.substr(std::string(kTrace).size());
    // The size of an expert may depend on the number of rows (":total"), so the trace is first read for that number.
    const std::size_t rows = read_trace(path, 0).layers.front().before.size();
    input.expert = expert_of(rows / ranks);
    Trace trace = read_trace(path, input.expert.bytes());
    const std::size_t named = options.experts > 0 ? options.experts : static_cast<std::size_t>(trace.largest + 1);
    input.workload = {ranks, named, rows, std::move(trace.layers)};
  } else {
    const std::vector<Policy> wanted = find_policies(options.policy);
    std::size_t redundant = options.has_redundant ? options.redundant : preset.redundant;
    if (!options.has_redundant) {
      for (const Policy policy : wanted) redundant = needed_redundant(policy, ranks, experts, redundant);
    }
    for (const Policy policy : wanted) {
      Workload part = make_workload(
          {policy, ranks, experts, redundant, options.layers > 0 ? options.layers : preset.layers, options.seed});
      for (Layer& layer : part.layers) layer.number += input.workload.layers.size();
      if (input.workload.layers.empty()) {
        input.workload = std::move(part);
      } else {
        std::move(part.layers.begin(), part.layers.end(), std::back_inserter(input.workload.layers));
      }
    }
    input.expert = expert_of(input.workload.local_rows());
  }
  check(input.workload);
  return input;
}

}  // namespace verbatim::eplb
