// Reads callgrind's output format 1 (valgrind.org/docs/manual/cl-format.html). Cost lines belong to the object named by
// the last `ob=`. The line after `calls=` is the inclusive cost of a call into the object named by the preceding
// `cob=`, or into the same object when there is no `cob=`.
#include <filesystem>
#include <fstream>
#include <string_view>
#include <utility>

#include "ranks/failure.h"
#include "verbatim-perf/cost/cells.h"

namespace verbatim::perf::cost {
namespace {

constexpr std::string_view kTriggerLine = "desc: Trigger: Client Request: ";

// A name is defined once, as "(3) name", and referred to as "(3)" afterwards.
class Names {
 public:
  const std::string& resolve(std::string_view text) {
    const std::size_t end = text.find(')');
    if (text.empty() || text[0] != '(' || end == std::string_view::npos) return plain_ = text;
    std::string& known = names_[std::string(text.substr(0, end))];
    if (end + 2 < text.size()) known = text.substr(end + 2);
    return known;
  }

 private:
  std::map<std::string, std::string> names_;
  std::string plain_;
};

bool is_cost_line(std::string_view line) {
  if (line.empty()) return false;
  const char first = line[0];
  return (first >= '0' && first <= '9') || first == '+' || first == '-' || first == '*';
}

// Parses "position cost". The only counted event is Ir (instructions).
double cost_of(std::string_view line, const std::string& file) {
  const std::size_t space = line.find(' ');
  try {
    return space == std::string_view::npos ? 0 : static_cast<double>(std::stoull(std::string(line.substr(space + 1))));
  } catch (const std::exception&) {
    throw ranks::Failure(file + ": not a cost line: " + std::string(line));
  }
}

enum class Object { kPlugin, kLibc, kVerbs, kOther };

Object object_named(const std::string& path, const std::filesystem::path& plugin) {
  const std::string name = std::filesystem::path(path).filename();
  if (name.starts_with("libc.so") || name.starts_with("libc-")) return Object::kLibc;
  if (name.starts_with("libibverbs")) return Object::kVerbs;
  return std::filesystem::weakly_canonical(path) == plugin ? Object::kPlugin : Object::kOther;
}

// Adds up the costs of one dump while its lines are read.
class Dump {
 public:
  explicit Dump(std::filesystem::path plugin) : plugin_(std::move(plugin)) {}

  void read(const std::string& line, const std::string& file) {
    if (line.starts_with(kTriggerLine)) {
      label_ = line.substr(kTriggerLine.size());
    } else if (line.starts_with("ob=")) {
      object_ = callee_ = object_named(names_.resolve(std::string_view(line).substr(3)), plugin_);
    } else if (line.starts_with("cob=")) {
      callee_ = object_named(names_.resolve(std::string_view(line).substr(4)), plugin_);
    } else if (line.starts_with("calls=")) {
      is_call_ = true;
    } else if (is_cost_line(line)) {
      add(cost_of(line, file));
    }
  }

  const std::string& label() const { return label_; }
  const Instructions& instructions() const { return instructions_; }

 private:
  void add(double cost) {
    if (!is_call_) {
      if (object_ == Object::kPlugin) instructions_.plugin += cost;
      if (object_ == Object::kVerbs) instructions_.verbs += cost;
      return;
    }
    if (object_ == Object::kPlugin && callee_ == Object::kLibc) instructions_.libc += cost;
    is_call_ = false;
    callee_ = object_;
  }

  const std::filesystem::path plugin_;
  Names names_;
  std::string label_;
  Object object_ = Object::kOther;
  Object callee_ = Object::kOther;
  bool is_call_ = false;
  Instructions instructions_;
};

ranks::Failure without_divisor(const std::string& file, const std::string& label) {
  return ranks::Failure(file + ": the label has no divisor: " + label);
}

}  // namespace

std::map<std::string, Instructions> read_dumps(const std::string& prefix, const std::string& plugin_object) {
  const std::filesystem::path plugin = std::filesystem::weakly_canonical(plugin_object);
  std::map<std::string, Instructions> dumps;
  for (int number = 1;; ++number) {
    const std::string path = prefix + "." + std::to_string(number);
    std::ifstream file(path);
    if (!file) return dumps;
    Dump dump(plugin);
    for (std::string line; std::getline(file, line);) dump.read(line, path);
    const std::string& label = dump.label();
    if (label.empty()) continue;  // the dump that callgrind writes at exit
    const std::size_t space = label.rfind(' ');
    if (space == std::string::npos) throw without_divisor(path, label);
    const double divisor = std::stod(label.substr(space + 1));
    Instructions& sum = dumps[label.substr(0, space)];
    sum.plugin += dump.instructions().plugin / divisor;
    sum.libc += dump.instructions().libc / divisor;
    sum.verbs += dump.instructions().verbs / divisor;
  }
}

}  // namespace verbatim::perf::cost
